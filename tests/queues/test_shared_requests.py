"""What only a shared queue has: workers, their leases, lost replies, the end of a crawl."""

import hashlib
import logging
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

import servers
from crawls import SUPPORT
from proxies import DroppingProxy
from redis_filters import messages
from request_queues import InRedis, name_of, names, push
from scrapy_bloom.queues import scripts
from scrapy_bloom.queues.batch import deserialized
from scrapy_bloom.queues.redis import SharedRequests

INFO = logging.INFO


@pytest.fixture(autouse=True)
def _all_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(INFO)


def drained(queue: SharedRequests) -> list[str]:
    """All that is to be taken, and done; in the order of their names."""
    found = []
    queue._look_again = 0.0
    while taken := queue.take():
        found.append(name_of(taken))
        queue.done(taken.id)
        queue._look_again = 0.0
    return sorted(found)


def look(queue: SharedRequests) -> Any:
    """Take the next request, now."""
    queue._look_again = 0.0
    return queue.take()


# Several workers.


def test_workers_share_the_requests(shared: InRedis, caplog: pytest.LogCaptureFixture) -> None:
    workers = [shared.open(prefetch=3) for _ in range(3)]
    for number in range(30):
        push(workers[number % 3], str(number))
    found: list[str] = []
    while taken := [each for worker in workers if (each := look(worker))]:
        found += map(name_of, taken)
    assert sorted(found) == sorted(map(str, range(30)))
    assert shared.counts() == (0, 30)
    assert [each.in_flight >= 9 for each in shared.state().workers] == [True] * 3
    assert not messages(caplog, INFO)


def test_one_works_on_what_another_process_has_pushed(shared: InRedis) -> None:
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from request_queues import *\n"
        "queue = InRedis('valkey', sys.argv[1], url=sys.argv[2]).open()\n"
        "for n in range(3):\n"
        "    push(queue, str(n), newest_first=False)\n"
        "queue.close()\n"
    )
    environment = {"PYTHONPATH": str(SUPPORT)}
    command = [sys.executable, "-c", script, shared.key, shared.url]
    subprocess.run(command, timeout=60, check=True, env=environment)
    assert names(shared.open(), 4) == ["0", "1", "2"]


def test_what_is_prefetched_is_given_back_at_the_close(shared: InRedis) -> None:
    worker, other = shared.open(prefetch=8), shared.open()
    for number in range(10):
        push(worker, str(number), newest_first=False)
    assert names(worker, 2) == ["0", "1"]
    assert shared.counts() == (2, 8)
    worker.close()
    assert not worker.is_last
    assert shared.counts() == (10, 0)
    assert names(other, 10) == [str(number) for number in range(10)]
    other.close()
    assert other.is_last


def test_slots_take_turns_among_all_workers(shared: InRedis) -> None:
    workers = [shared.open(by_slot=True) for _ in range(2)]
    for number in range(3):
        for slot in "abcd":
            push(workers[0], f"{slot}{number}", slot=slot, newest_first=False)
    order = [name for _ in range(6) for worker in workers for name in names(worker, 1)]
    assert order == [f"{slot}{number}" for number in range(3) for slot in "abcd"]


@pytest.mark.parametrize("key", ["shop:bloom", "ü", "a b\n"])
def test_all_keys_are_in_one_slot_of_a_cluster(key: str) -> None:
    """Else no script could use them."""
    cluster = InRedis("cluster", key)
    slots = {cluster.server.send("CLUSTER KEYSLOT", each) for each in cluster.keys}
    assert len(slots) == 1
    cluster.end()


# Replies that are lost.


class OneReplyLost(DroppingProxy):
    """Drops the next reply to a script, once it is told which one."""

    def __init__(self, shared: InRedis) -> None:
        self._next = b""
        super().__init__(int(shared.url.rpartition(":")[2].split("/")[0]), 0.0, 0)

    def lose(self, script: str) -> None:
        self._next = hashlib.sha1(script.encode()).hexdigest().encode()

    def _drops(self, asked: bytes) -> bool:
        if not self._next or self._next not in asked:
            return False
        self._next = b""
        self.dropped += 1
        return True

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"


def test_each_step_may_lose_its_reply(shared: InRedis) -> None:
    """The answer is then the same, and what is stored is stored once."""
    proxy = OneReplyLost(shared)
    warm = InRedis("valkey", f"{shared.key}:other")
    other = warm.open()  # so that the server knows all scripts, and none is sent twice for that
    assert other.claim_start()
    other.end_start(other.id, is_through=True)
    push(other, "a")
    other.set_aside(other.take().id)
    other.close()
    warm.end()

    def lost(script: str, step: Callable[[], Any]) -> Any:
        before = proxy.dropped
        proxy.lose(script)
        answer = step()
        assert proxy.dropped == before + 1
        return answer

    worker = lost(scripts.JOIN, lambda: shared.open(url=proxy.url, prefetch=2))
    assert len(shared.state().workers) == 1
    assert lost(scripts.START, worker.claim_start)
    for name in "abcd":
        assert lost(scripts.PUSH, lambda name=name: push(worker, name, newest_first=False))
    assert shared.counts() == (4, 0)
    lost(scripts.STARTED, lambda: worker.end_start(worker.id, is_through=True))
    assert shared.state().is_started
    taken = lost(scripts.TAKE, lambda: look(worker))
    assert name_of(taken) == "a"
    assert shared.counts() == (2, 2)
    worker.done(taken.id)
    second = look(worker)
    assert name_of(second) == "b"
    lost(scripts.SET_ASIDE, lambda: worker.set_aside(second.id))
    third = lost(scripts.TAKE, lambda: look(worker))
    assert name_of(third) == "c"
    assert shared.state().done == 1
    worker.done(third.id)
    rival = shared.open()
    shared.lapse(worker)
    (again,) = names(rival, 1)
    assert again in {"c", "d"}
    assert name_of(lost(scripts.JOIN, lambda: look(worker))) in {"c", "d"} - {again}
    lost(scripts.LEAVE, worker.close)
    assert not worker.is_last
    rival.close()
    assert rival.is_last
    assert shared.state().done == 1
    assert names(shared.open(), 4) == ["b", "c", "d"]
    proxy.end()


# The end of a lease.


def test_what_a_dead_worker_had_is_for_the_others(
    shared: InRedis, caplog: pytest.LogCaptureFixture
) -> None:
    dead, *others = (shared.open(prefetch=2) for _ in range(3))
    for number in range(5):
        push(dead, str(number), newest_first=False)
    assert names(dead, 1) == ["0"]  # and it holds another one
    shared.die(dead)
    assert [name_of(look(other)) for other in others] == ["2", "4"]
    assert not messages(caplog, INFO)
    shared.bury()
    assert [name_of(look(other)) for other in others] == ["3", "0"]
    (line,) = messages(caplog, INFO)
    assert "gives no sign of life: its lease is over, and 2 requests" in line
    assert name_of(look(others[1])) == "1"
    assert sorted(each.in_flight for each in shared.state().workers) == [2, 3]
    assert messages(caplog, INFO) == [line]


def test_a_lease_that_ends_by_itself(shared: InRedis, caplog: pytest.LogCaptureFixture) -> None:
    """With the server's clock, and nothing but the time."""
    stopped, other = shared.open(lease_secs=1), shared.open(lease_secs=1)
    push(stopped, "a")
    taken = look(stopped)
    assert taken
    stopped._lease.end()  # as SIGSTOP does, or the kill of the process
    found: list[Any] = []
    servers.wait_for(lambda: bool(found.append(look(other)) or found[-1]), lambda: "not taken")
    assert name_of(found[-1]) == "a"
    (line,) = messages(caplog, INFO)
    assert "1 request is" in line
    stopped.done(taken.id)  # it goes on
    assert look(stopped) is None
    assert shared.state().done == 0
    assert "goes on with a new one" in messages(caplog, INFO)[1]
    other.done(found[-1].id)
    assert look(other) is None
    assert shared.state().done == 1


def test_a_worker_that_is_busy_for_long_keeps_what_it_has(shared: InRedis) -> None:
    busy, other = shared.open(lease_secs=6), shared.open(lease_secs=6)
    push(busy, "a")
    assert names(busy, 1) == ["a"]

    def end_of_lease() -> float:
        return float(shared.server.send("HGET", shared.keys[2], busy._worker))

    until = end_of_lease()
    servers.wait_for(lambda: end_of_lease() > until, lambda: "its lease is not renewed")
    assert look(other) is None
    assert other.take() is None
    assert shared.counts() == (0, 1)


def test_a_worker_that_stood_still_goes_on_with_a_new_lease(
    shared: InRedis, caplog: pytest.LogCaptureFixture
) -> None:
    worker, other = shared.open(prefetch=4), shared.open(prefetch=9)
    for number in range(6):
        push(worker, str(number), newest_first=False)
    first, second = look(worker), look(worker)
    worker.done(first.id)
    shared.lapse(worker)
    assert names(other, 9) == [str(number) for number in range(6)]
    worker.done(second.id)  # that is the other's now, also what the worker holds
    assert look(worker) is None
    dead, goes_on = messages(caplog, INFO)
    assert "4 requests" in dead
    assert "goes on with a new one, and 0 requests" in goes_on
    push(worker, "new")
    assert names(worker, 1) == ["new"]
    assert shared.counts() == (0, 7)
    assert shared.state().done == 0


def test_a_push_after_the_end_of_a_lease(shared: InRedis) -> None:
    """Its first word after it stood still: stored once, and what it had held is pending again."""
    worker = shared.open(prefetch=2)
    for number in range(3):
        push(worker, str(number), newest_first=False)
    assert names(worker, 1) == ["0"]
    shared.lapse(worker)
    other = shared.open()
    assert names(other, 1) == ["0"]
    push(worker, "3", newest_first=False)
    assert shared.counts() == (3, 1)
    worker.take_back()
    assert shared.counts() == (2, 1)
    assert names(worker, 9) == ["1", "2"]


def test_leases_that_are_over_all_at_once_are_renewed_first(shared: InRedis) -> None:
    """As when the server was away for long: nobody is dead."""
    workers = [shared.open() for _ in range(2)]
    push(workers[0], "a")
    push(workers[0], "b")
    taken = [look(worker) for worker in workers]
    for worker in workers:
        shared.lapse(worker)
    assert look(workers[0]) is None
    assert look(workers[1]) is None
    for worker, each in zip(workers, taken, strict=True):
        worker.done(each.id)
    assert look(workers[0]) is None
    assert look(workers[1]) is None
    assert shared.state().done == 2


# The beginning and the end.


def test_one_worker_runs_start_and_another_after_its_death(shared: InRedis) -> None:
    first, second, third = (shared.open() for _ in range(3))
    assert [each.claim_start() for each in (first, second, first)] == [True, False, True]
    assert look(second) is None
    assert not second.can_start
    shared.die(first)
    shared.bury()
    assert look(second) is None
    assert second.can_start
    assert [each.claim_start() for each in (second, third)] == [True, False]
    second.end_start(second.id, is_through=False)  # it has failed
    assert look(third) is None
    assert third.can_start
    assert third.claim_start()
    second.end_start(second.id, is_through=True)  # of one that is not the one
    assert not shared.state().is_started
    third.end_start(third.id, is_through=True)
    assert not second.claim_start()
    assert shared.state().is_started


def test_the_end_is_seen_by_all(shared: InRedis) -> None:
    first, second = shared.open(), shared.open()
    assert look(first) is None
    assert not first.ended_at  # start() may find something
    assert first.claim_start()
    push(first, "a")
    first.end_start(first.id, is_through=True)
    taken = look(second)
    assert look(first) is None
    assert not first.ended_at
    second.done(taken.id)
    assert look(second) is None
    assert look(first) is None
    now = shared.server.now()
    assert second.ended_at == first.ended_at == shared.state().ended_at
    assert now - 60 < first.ended_at <= now
    late = shared.open()
    assert late.ended_at == first.ended_at
    push(late, "more")  # by hand, for example
    assert not shared.state().ended_at
    assert drained(first) == ["more"]
    assert first.ended_at
    assert not late.ended_at
    assert look(late) is None
    assert late.ended_at == first.ended_at


def test_what_no_worker_can_read_keeps_no_crawl_from_its_end(shared: InRedis) -> None:
    worker, other = shared.open(), shared.open()
    assert worker.claim_start()
    push(worker, "gone callback")
    worker.end_start(worker.id, is_through=True)
    worker.set_aside(look(worker).id)
    assert look(other) is None
    assert other.ended_at
    shared.lapse(worker)  # who comes back is not a later run
    assert look(other) is None
    other.close()
    assert look(worker) is None
    worker.close()
    assert names(shared.open(), 1) == ["gone callback"]


# What a stopped worker does when it goes on.


def test_what_another_one_has_recorded_is_not_taken_back(shared: InRedis) -> None:
    """The other has found it dead, and recorded its last push: to this one, it looks seen."""
    stopped, other = shared.open(), shared.open()
    recorded: list[bytes] = []
    other._record = recorded.append
    push(stopped, "urgent", priority=5)
    push(stopped, "newest")
    shared.lapse(stopped)
    assert name_of(look(other)) == "urgent"
    assert [deserialized(each) for each in recorded] == [{"name": "newest"}]
    stopped.take_back()
    assert name_of(look(other)) == "newest"
