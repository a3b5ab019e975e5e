"""What only a shared queue has: workers, leases, lost replies, suspects, the end of a crawl."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from scrapy_bloom.generations.policy import Size
from scrapy_bloom.queues.redis_queue import stop_workers
from scrapy_bloom.queues.redis_store import RedisStore
from scrapy_bloom.queues.serialized import deserialized, serialized
from scrapy_bloom.queues.store import (
    Batch,
    End,
    Ended,
    Entered,
    Joining,
    Limit,
    Limits,
    RejoinedError,
    State,
)
from scrapy_bloom.redis import scripts
from scrapy_bloom.redis.batch_script import BATCH
from tests.support import servers
from tests.support.crawls import ROOT
from tests.support.proxies import DroppingProxy
from tests.support.redis_filters import PLACES
from tests.support.request_queues import (
    SHOP,
    InRedis,
    done,
    enter,
    failed,
    name_of,
    names,
    page,
    push,
    replaced,
    request,
    take,
    taken,
    unreadable,
)


def started(worker: RedisStore) -> None:
    """Have a worker run the spider's start(), which yields nothing."""
    worker.apply(Batch(may_start=True))
    worker.apply(Batch(start_ended=True))


# Every kind of server.


@pytest.mark.parametrize("place", PLACES)
def test_each_kind_of_server_keeps_what_killed_workers_had(place: str, tmp_path: Path) -> None:
    """Each change is stored before the call returns; all scripts run on each of the servers."""
    script = (
        "import os, signal, sys\n"
        "from scrapy_bloom.queues.store import Joining\n"
        "from tests.support.request_queues import *\n"
        "place, key, url = sys.argv[1:]\n"
        "store = InRedis(place, key, url=url).open(Joining('shop', 'monday'), by_slot=True)\n"
        "for number in range(200):\n"
        "    enter(store, page(str(number), slot='ab'[number % 2], newest_first=False))\n"
        "requests = [taken(store) for _ in range(10)]\n"
        "done(store, requests[0])\n"
        "failed(store, requests[1])\n"
        "unreadable(store, requests[2])\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    shared = InRedis(place, str(tmp_path))
    ended = subprocess.run(
        [sys.executable, "-c", script, place, shared.key, shared.url],
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
    )
    assert ended.returncode == -signal.SIGKILL
    assert shared.counts() == (190, 7)
    shared.lapse_all()
    store = shared.open(Joining("shop", "tuesday"), by_slot=True)
    reply = store.apply(Batch())
    assert (reply.pending, list(reply.expired.values())) == (199, [7])
    crawled = names(store, 300)
    assert sorted(map(int, crawled)) == list(range(1, 200))
    store.close()
    assert shared.queue().slots() == {"a": 99, "b": 100}
    assert shared.queue().move(State.PENDING, None, "a") == 99
    assert shared.counts() == (100, 0)
    shared.end()


# Several workers.


def test_a_link_that_several_find_is_queued_once(shared: InRedis) -> None:
    found = Entered(serialized({"name": "page"}), b"fingerprint")
    queued = [worker.apply(Batch([found])).queued for worker in (shared.open(), shared.open())]
    assert queued == [[True], [False]]
    assert shared.counts() == (1, 0)


def test_the_answers_are_in_the_order_of_the_batch(shared: InRedis) -> None:
    """Whether a request is queued depends on its flags, and on its fingerprint."""
    worker = shared.open()
    pages = [Entered(b"%d" % number, b"page %d" % number) for number in range(10)]
    unrecorded = [pages[number]._replace(is_recorded=False) for number in (1, 3)]
    enter(worker, pages[0], unrecorded[0], pages[2], unrecorded[1], *pages[4:8])
    unfiltered = [pages[number]._replace(is_filtered=False) for number in (6, 7)]
    reply = worker.apply(Batch([*pages[:6], *unfiltered, *pages[8:]]))
    queued = [index for index, is_queued in enumerate(reply.queued) if is_queued]
    assert queued == [1, 3, 6, 7, 8, 9]
    assert (reply.left, reply.pending, reply.counters) == (14, 14, (14, 0))


def test_a_worker_that_leaves_gives_back_what_it_has(shared: InRedis) -> None:
    worker, other = shared.open(), shared.open()
    for number in range(10):
        push(worker, str(number), newest_first=False)
    assert names(worker, 8) == [str(number) for number in range(8)]
    closed = worker.close()
    assert (closed.others, closed.counts[State.PENDING], closed.ended_at) == (1, 10, 0)
    assert shared.counts() == (10, 0)
    assert names(other, 10) == [str(number) for number in range(10)]
    closed = other.close()
    assert (closed.others, closed.counts[State.PENDING]) == (0, 10)
    assert not shared.state().workers


def test_more_is_given_back_than_one_script_may_move(shared: InRedis) -> None:
    worker = shared.open()
    enter(worker, *(Entered(serialized({"name": str(n)})) for n in range(500)))
    while worker.apply(Batch(want=100)).taken:
        pass
    assert shared.counts() == (0, 500)
    worker.close()
    assert shared.counts() == (500, 0)


def test_slots_are_served_round_robin_for_all_workers(shared: InRedis) -> None:
    workers = [shared.open(by_slot=True) for _ in range(2)]
    for number in range(3):
        for slot in "abcd":
            push(workers[0], f"{slot}{number}", slot=slot, newest_first=False)
    order = [name for _ in range(6) for worker in workers for name in names(worker, 1)]
    assert order == [f"{slot}{number}" for number in range(3) for slot in "abcd"]


# Replies that are lost.


class OneReplyLost(DroppingProxy):
    """Drops the next reply to a script, once a test has chosen it."""

    def __init__(self, port_of_server: int) -> None:
        self._next = b""
        super().__init__(port_of_server, 0.0, 0)

    def lose(self, script: str, server: servers.Server) -> None:
        server.client.script_flush()  # so that the whole script is sent, and can be known
        self._next = script[-200:].encode()

    def _drops(self, asked: bytes) -> bool:
        if not self._next or self._next not in asked:
            return False
        self._next = b""
        self.dropped += 1
        return True


def test_each_script_may_lose_its_reply(shared: InRedis, server: servers.Server) -> None:
    """What is sent again has the same effect, once."""
    proxy = OneReplyLost(server.port)
    own = InRedis("valkey", "k", url=f"redis://127.0.0.1:{proxy.port}/0")

    def lost(script: str, step: Callable[[], Any]) -> Any:
        before = proxy.dropped
        proxy.lose(script, server)
        answer = step()
        assert proxy.dropped == before + 1
        return answer

    worker = own.make()
    opened = lost(scripts.JOIN, lambda: worker.open(Joining("shop", "monday")))
    assert (opened.began, opened.is_first, opened.others) == (True, True, 0)
    assert len(own.state().workers) == 1
    for name in "abcd":
        lost(BATCH, lambda name=name: push(worker, name, newest_first=False))
    assert own.counts() == (4, 0)
    reply = lost(BATCH, lambda: worker.apply(Batch(want=2, may_start=True)))
    assert [name_of(each) for each in reply.taken] == ["a", "b"]
    assert reply.runs_start
    assert own.counts() == (2, 2)
    link = page("link", newest_first=False)
    reply = lost(BATCH, lambda: worker.apply(Batch([link], ended=[Ended(reply.taken[0].id)])))
    assert (reply.queued, reply.added) == ([True], 1)
    assert (reply.left, own.state().done) == (4, 1)
    answers = lost(BATCH, lambda: enter(worker, link, request("e", priority=1), link))
    assert answers == [False, True, False]
    assert name_of(lost(BATCH, lambda: taken(worker))) == "e"
    third = lost(BATCH, lambda: taken(worker))
    lost(BATCH, lambda: unreadable(worker, third))
    assert own.counts() == (2, 2)
    lost(scripts.LEAVE, worker.close)
    assert own.counts() == (4, 0)
    worker = own.make()
    lost(scripts.MOVE, lambda: worker.open(Joining("shop", "monday")))
    assert sorted(names(worker, 5)) == ["b", "c", "d", "e", "link"]
    own.end()
    proxy.end()


def test_replies_about_failed_requests_may_be_lost(shared: InRedis, server: servers.Server) -> None:
    """A request is kept once, and tried once more in the next run."""
    proxy = OneReplyLost(server.port)
    own = InRedis("valkey", "k", url=f"redis://127.0.0.1:{proxy.port}/0")
    start = page("start", once=True, is_start=True)
    for run in range(3):
        worker = own.make()
        proxy.lose(scripts.JOIN, server)
        assert worker.open(Joining("shop", str(run))).retried == (run > 0)
        proxy.lose(BATCH, server)
        assert enter(worker, start, start) == [True, False]
        found = taken(worker)
        assert (found.tries, take(worker)) == (run, None)
        proxy.lose(BATCH, server)
        reply = failed(worker, found)
        assert (reply.left, reply.counters) == (0, (run + 1, run))
        proxy.lose(scripts.LEAVE, server)
        worker.close()
        assert [each.tries for each in own.queue().requests(State.FAILED)] == [run]
    proxy.lose(scripts.MOVE, server)
    own.queue().move(State.FAILED, State.PENDING)
    assert own.counts() == (1, 0)
    assert proxy.dropped == 3 * 4 + 1
    own.end()
    proxy.end()


# Leases.


def test_what_a_dead_worker_had_is_for_the_others(shared: InRedis) -> None:
    dead, *others = (shared.open() for _ in range(3))
    for number in range(5):
        push(dead, str(number), newest_first=False)
    assert names(dead, 2) == ["0", "1"]
    assert [names(other, 1) for other in others] == [["2"], ["3"]]
    shared.lapse(dead)
    reply = others[0].apply(Batch(want=1))
    assert reply.expired == {f"{socket.gethostname()}:{os.getpid()}": 2}
    assert [name_of(each) for each in reply.taken] == ["0"]
    assert not others[1].apply(Batch()).expired
    assert names(others[1], 9) == ["1", "4"]
    assert sorted(each.in_flight for each in shared.state().workers) == [2, 3]


def test_a_lease_that_ends_by_itself(shared: InRedis) -> None:
    """With the server's clock, and nothing but the time."""
    stopped, other = (shared.make(lease_secs=0.5) for _ in range(2))
    stopped.open(SHOP)
    push(stopped, "a")
    request = taken(stopped)
    other.open(SHOP)
    found: list[Any] = []
    servers.wait_for(lambda: bool(found.append(take(other)) or found[-1]), lambda: "not taken")
    assert name_of(found[-1]) == "a"
    with pytest.raises(RejoinedError, match="has no lease of this worker"):
        done(stopped, request)
    done(stopped, request)  # it goes on as another worker, to whom this token says nothing
    assert take(stopped) is None
    assert shared.state().done == 0
    done(other, found[-1])
    assert shared.state().done == 1


def test_each_batch_renews_the_lease(shared: InRedis) -> None:
    worker, other = shared.open(), shared.open()
    push(worker, "a")
    assert names(worker, 1) == ["a"]
    shared.server.send("HINCRBY", shared.keys["workers"], worker.worker, -500_000)
    worker.apply(Batch())
    until = int(shared.server.send("HGET", shared.keys["workers"], worker.worker))
    assert until > 1000 * (shared.server.now() + 500)
    assert take(other) is None
    assert shared.counts() == (0, 1)


def test_leases_that_are_over_all_at_once_are_renewed_first(shared: InRedis) -> None:
    """As when the server was away for long: nobody is dead."""
    workers = [shared.open() for _ in range(2)]
    push(workers[0], "a")
    push(workers[0], "b")
    requests = [taken(worker) for worker in workers]
    for worker in workers:
        shared.lapse(worker)
    for worker in workers:
        assert take(worker) is None
    for worker, found in zip(workers, requests, strict=True):
        done(worker, found)
    assert shared.state().done == 2


def test_no_lease_lies_further_ahead_than_it_lasts(shared: InRedis) -> None:
    """As after the server's clock went back."""
    dead, other = shared.open(), shared.open()
    shared.server.send("HSET", shared.keys["workers"], dead.worker, 10**15)
    shared.server.send("HDEL", shared.key, "look")
    other.apply(Batch())
    until = int(shared.server.send("HGET", shared.keys["workers"], dead.worker))
    assert until < 1000 * (shared.server.now() + 601)


# Slots with a delay.

DELAYED = Limits(Limit(has_delay=True))
PAUSE_SECS, STEP_MS = 5, 3_600_000


def test_no_pause_of_a_slot_lasts_longer_than_it_was_long(shared: InRedis) -> None:
    """As after the server's clock went back, when the worker that had the slot is gone."""
    dead, other = (shared.open(by_slot=True, limits=DELAYED) for _ in range(2))
    for number in range(2):
        push(dead, str(number), slot="a", newest_first=False)
    request = taken(dead)
    dead.apply(Batch(ended=[Ended(request.id)], downloaded=[(request.id, "a", PAUSE_SECS)]))
    shared.lapse(dead)
    assert take(other) is None
    (mark,) = shared.server.send("ZRANGE", shared.keys["downloading"], 0, -1)
    start = len(b"a\0") + scripts.WORKER_BYTES + 1
    ends = int.from_bytes(mark[start : start + 7], "big") + STEP_MS
    shared.server.send("DEL", shared.keys["downloading"])
    later = mark[:start] + ends.to_bytes(7, "big") + mark[start + 7 :]
    shared.server.send("ZADD", shared.keys["downloading"], 0, later)
    assert names(other, 1) == ["1"]


@pytest.mark.parametrize("is_over", [False, True])
def test_pauses_that_are_over_are_removed(is_over: bool, shared: InRedis) -> None:
    """Also those of slots that have no more requests."""
    worker = shared.open(by_slot=True, limits=DELAYED)
    slots = 500

    def marks() -> int:
        return int(shared.server.send("ZCARD", shared.keys["downloading"]))

    for number in range(slots):
        push(worker, str(number), slot=str(number))
        request = taken(worker)
        pause = PAUSE_SECS if number < slots / 2 or is_over else 0.001
        worker.apply(
            Batch(ended=[Ended(request.id)], downloaded=[(request.id, request.slot, pause)])
        )
    if is_over:
        assert marks() == slots
        worker.close()
        assert not marks()
        return
    assert marks() < slots
    servers.wait_for(lambda: bool(worker.apply(Batch())) and not marks(), lambda: f"{marks()}")


# start(), and the end.


def test_one_worker_runs_start_and_another_after_its_death(shared: InRedis) -> None:
    first, second, third = (shared.open() for _ in range(3))
    may = Batch(may_start=True)
    assert [each.apply(may).runs_start for each in (first, second, first)] == [True, False, True]
    shared.lapse(first)
    # Who finds it dead runs it at once.
    assert [each.apply(may).runs_start for each in (second, third)] == [True, False]
    assert not third.apply(Batch(start_ended=True)).is_started  # it is not the one
    second.close()
    assert third.apply(may).runs_start
    assert third.apply(Batch(start_ended=True)).is_started
    assert not third.apply(may).runs_start


def test_the_end_is_noted_when_nothing_is_left(shared: InRedis) -> None:
    first, second = shared.open(), shared.open()
    over = Batch(is_over=True)
    assert not first.apply(over).ended_at  # start() may find something
    first.apply(Batch(may_start=True))
    push(first, "a")
    first.apply(Batch(start_ended=True))
    request = taken(second)
    assert not first.apply(over).ended_at
    done(second, request)
    assert not second.apply(Batch()).ended_at  # only the second look stores it
    ended = first.apply(over).ended_at
    assert second.apply(over).ended_at == ended == shared.state().ended_at
    assert shared.server.now() - 60 < ended <= shared.server.now()
    late = shared.open()
    assert late.ended_at == ended
    push(late, "more")  # by hand, for example
    assert not shared.state().ended_at
    assert names(first, 2) == ["more"]


def test_what_no_worker_can_read_keeps_no_crawl_from_its_end(shared: InRedis) -> None:
    worker, other = shared.open(), shared.open()
    started(worker)
    push(worker, "gone callback")
    unreadable(worker, taken(worker))
    reply = other.apply(Batch(want=1, is_over=True))
    assert (reply.taken, reply.left, bool(reply.ended_at)) == ([], 0, True)
    other.close()
    worker.close()
    assert shared.state().counts[State.UNREADABLE] == 1
    assert names(shared.open(), 1) == ["gone callback"]  # of a later run


# Requests that seem to kill their workers.


def die_of(shared: InRedis, times: int, watching: RedisStore, want: int = 1) -> list[str]:
    """Have workers take a request each, and die; the names of those that are dead letters then."""
    dead: list[bytes] = []
    for _ in range(times):
        worker = shared.open()
        assert len(worker.apply(Batch(want=want)).taken) == want
        shared.lapse(worker)
        dead += watching.apply(Batch()).died
    return [deserialized(each)["name"] for each in dead]


def test_a_request_in_three_workers_that_died_is_handed_out_alone_and_last(shared: InRedis) -> None:
    watching = shared.open()
    push(watching, "guilty")
    assert die_of(shared, 3, watching) == []
    state = shared.state()
    assert (state.pending, state.counts[State.SUSPECT]) == (0, 1)
    push(watching, "innocent")
    worker = shared.open()
    reply = worker.apply(Batch(want=5))
    assert [name_of(each) for each in reply.taken] == ["innocent"]
    assert not worker.apply(Batch(want=5)).taken  # this worker has another one
    alone = worker.apply(Batch(want=5, ended=[Ended(reply.taken[0].id)])).taken
    assert [name_of(each) for each in alone] == ["guilty"]
    push(watching, "later")
    assert not worker.apply(Batch(want=5)).taken  # nothing next to the suspect
    shared.lapse(worker)
    died = watching.apply(Batch()).died
    assert [deserialized(each)["name"] for each in died] == ["guilty"]
    state = shared.state()
    assert (state.pending, state.counts[State.SUSPECT], state.counts[State.DEAD]) == (1, 0, 1)
    assert shared.queue().move(State.DEAD, State.PENDING) == 1
    assert names(watching, 3) == ["guilty", "later"]


def test_a_suspect_is_taken_by_a_worker_whose_requests_all_wait(shared: InRedis) -> None:
    watching = shared.open()
    push(watching, "guilty")
    die_of(shared, 3, watching)
    push(watching, "waits for it")
    assert names(watching, 1) == ["waits for it"]
    assert not watching.apply(Batch(want=1)).taken
    reply = watching.apply(Batch(want=1, stands_still=True))
    assert [name_of(each) for each in reply.taken] == ["guilty"]


def test_only_the_suspect_that_a_worker_had_is_blamed_for_its_death(shared: InRedis) -> None:
    watching = shared.open()
    push(watching, "guilty")
    die_of(shared, 3, watching)
    push(watching, "waits for it")
    worker = shared.open()
    assert names(worker, 1) == ["waits for it"]
    assert worker.apply(Batch(want=1, stands_still=True)).taken
    shared.lapse(worker)
    reply = watching.apply(Batch())
    assert (len(reply.died), list(reply.expired.values())) == (1, [1])
    assert shared.counts() == (1, 0)
    assert die_of(shared, 2, watching) == []
    assert shared.counts() == (1, 0)  # blamed twice, and not for the first death


def test_a_worker_that_comes_back_takes_the_blame_away(shared: InRedis) -> None:
    watching, stopped = shared.open(), shared.open()
    push(watching, "page")
    assert names(stopped, 1) == ["page"]
    shared.lapse(stopped)
    watching.apply(Batch())
    assert die_of(shared, 2, watching) == []
    assert shared.state().counts[State.SUSPECT] == 1
    with pytest.raises(RejoinedError):
        stopped.apply(Batch())
    reply = stopped.apply(Batch(want=1))
    reply = stopped.apply(Batch(want=1)) if not reply.taken else reply
    assert [name_of(each) for each in reply.taken] == ["page"]
    shared.lapse(stopped)
    assert not watching.apply(Batch()).died


def test_a_dead_letter_comes_back_with_the_worker_that_had_it(shared: InRedis) -> None:
    watching, stopped = shared.open(), shared.open()
    push(watching, "page")
    die_of(shared, 3, watching)
    assert names(stopped, 1) == ["page"]
    shared.lapse(stopped)
    assert watching.apply(Batch()).died
    with pytest.raises(RejoinedError):
        stopped.apply(Batch())
    state = shared.state()
    assert (state.counts[State.SUSPECT], state.counts[State.DEAD]) == (1, 0)


def test_a_worker_that_leaves_is_not_blamed(shared: InRedis) -> None:
    for number in range(5):
        worker = shared.open()
        if number == 0:
            push(worker, "page")
        assert names(worker, 1) == ["page"]
        worker.close()
    assert shared.state().counts[State.SUSPECT] == 0


# Fields of workers that are gone.


def fields(shared: InRedis) -> set[bytes]:
    return {
        name.partition(b":")[0] for name in shared.server.send("HGETALL", shared.keys["workers"])
    }


def test_fields_of_killed_workers_are_removed_after_an_hour(shared: InRedis) -> None:
    watching = shared.open()
    killed = [shared.open() for _ in range(20)]
    stop_workers(shared.server, shared.key, [killed[0].worker.decode()])
    for number, worker in enumerate(killed):
        push(worker, str(number), priority=number)
        assert names(worker, 1) == [str(number)]
        shared.lapse(worker)
        watching.apply(Batch())
    gone = {worker.worker for worker in killed}
    assert gone <= fields(shared)  # they may come back
    for worker in killed[:10]:
        name = worker.worker + b":number"
        number = shared.server.send("HGET", shared.keys["workers"], name)
        earlier = int(number.split()[-1]) - 3_700_000
        shared.server.send("HSET", shared.keys["workers"], name, f"gone 1 {earlier}")
    shared.server.send("HDEL", shared.key, "look")
    watching.apply(Batch())
    assert fields(shared) == {watching.worker, *(worker.worker for worker in killed[10:])}
    with pytest.raises(RejoinedError):
        killed[0].apply(Batch())
    with pytest.raises(RejoinedError):
        killed[15].apply(Batch())


def test_a_worker_that_is_stopped_after_its_lease_has_expired(shared: InRedis) -> None:
    """`scrapy bloom stop` does not wait for it, because it may have been killed."""
    worker, other = shared.open(), shared.open()
    stop_workers(shared.server, shared.key, [worker.worker.decode()])
    shared.lapse(worker)
    assert other.apply(Batch()).expired
    with pytest.raises(RejoinedError):
        worker.apply(Batch())
    assert worker.apply(Batch()).is_stopped


def test_the_last_worker_leaves_no_fields(shared: InRedis) -> None:
    worker, killed = shared.open(), shared.open()
    shared.lapse(killed)
    worker.apply(Batch())
    worker.close()
    assert not fields(shared)


def test_workers_with_one_name_are_two(shared: InRedis) -> None:
    """As in containers, where the process has the same number, and maybe the same host name."""
    workers = [shared.open() for _ in range(2)]
    one, other = shared.state().workers
    assert one.name == other.name
    stop_workers(shared.server, shared.key, [workers[0].worker.decode()])
    assert [worker.apply(Batch()).is_stopped for worker in workers] == [True, False]
    stop_workers(shared.server, shared.key, ["0" * 16])  # it has left
    assert len(fields(shared)) == 2


# Runs.


@pytest.mark.parametrize("how", ["enters", "is recorded at its end"])
def test_what_an_older_generation_has_is_recorded_again_for_the_run(
    how: str, shared: InRedis
) -> None:
    """Otherwise, it would expire in the run, and links to it would be new."""
    shared.window_secs = 3600.0
    monday = shared.open(Joining("shop", "monday"))
    enter(monday, start := page("start"))
    done(monday, taken(monday))
    filter_ = monday._filter
    filter_.append(filter_._policy.first(), filter_.now(), filter_.now() + 900)
    tuesday = shared.open(Joining("shop", "tuesday"))
    if how == "enters":
        assert enter(tuesday, start._replace(once=True)) == [True]
        done(tuesday, taken(tuesday))
    else:
        assert start.fingerprint
        tuesday.apply(Batch(recorded=[start.fingerprint]))
    tuesday._filter.expire(1)
    later = shared.open(Joining("shop", "tuesday"))
    assert enter(later, start) == [False]


def begin_generation(worker: RedisStore) -> None:
    """Add a generation, whose fingerprints have more bits than those before."""
    filter_ = worker._filter
    size = Size(capacity=1000, error_rate=1e-18)
    assert filter_.append(size, filter_.now(), filter_.now() + 900)


def test_a_redirect_and_its_page_expire_together(shared: InRedis) -> None:
    """Both are recorded in the newest generation when the row is done, also of one that waits."""
    shared.window_secs = 3600.0
    worker = shared.open()
    # The first one is redirected to x and y, the second one to z and then to y, for which it waits.
    enter(worker, page("a", newest_first=False), page("b", newest_first=False))
    first, second = taken(worker), taken(worker)
    assert replaced(worker, first, page("x"))
    assert replaced(worker, taken(worker), page("y"))
    assert replaced(worker, second, page("z", priority=1))
    second = taken(worker)
    begin_generation(worker)
    assert not replaced(worker, second, page("y"))
    assert worker.counts()[State.WAITING] == 1
    begin_generation(worker)
    reply = done(worker, taken(worker))
    assert (reply.left, reply.added, reply.counters) == (0, 3, (2, 2))
    worker._filter.expire(2)
    later = shared.open()
    assert enter(later, *map(page, "abxyz"), page("other")) == [False] * 5 + [True]


def test_a_start_request_of_an_earlier_run_is_recorded_for_this_one(shared: InRedis) -> None:
    """The key of the run in which its row ends, also if it has waited."""
    monday = shared.open(Joining("shop", "monday"))
    start, other = (page(name, once=True, newest_first=False) for name in ("start", "other"))
    enter(monday, start, other)
    monday.close()
    tuesday = shared.open(Joining("shop", "tuesday"))
    first, second = taken(tuesday), taken(tuesday)
    assert enter(tuesday, start) == [False]  # it is open
    assert not replaced(tuesday, second, page("start"))
    assert tuesday.apply(Batch(ended=[Ended(first.id)])).left == 0
    assert enter(tuesday, start, other) == [False, False]
    assert not any(tuesday.counts().values())


def test_another_run_retires_the_workers_of_the_last_one(shared: InRedis) -> None:
    old = shared.open(Joining("shop", "monday"))
    push(old, "a", newest_first=False)
    push(old, "b", newest_first=False)
    old.apply(Batch(may_start=True))
    in_flight = taken(old)
    new = shared.make()
    opened = new.open(Joining("shop", "tuesday"))
    assert (opened.began, opened.others) == (True, 1)
    assert new.apply(Batch(may_start=True)).runs_start
    start = page("start", once=True)
    reply = old.apply(Batch([start], ended=[Ended(in_flight.id)], want=5, may_start=True))
    assert (reply.is_retired, reply.taken, reply.queued) == (True, [], [True])
    assert not reply.runs_start
    assert old.run == new.run
    assert enter(new, start) == [False]  # what the other has found counts for this run
    reply = old.apply(Batch(want=5, start_ended=True, is_over=True))
    assert (reply.is_retired, reply.taken, reply.is_started) == (True, [], False)
    assert sorted(names(new, 5)) == ["b", "start"]
    assert (old.close().others, len(shared.state().workers)) == (1, 1)


def test_what_a_retired_worker_has_is_for_the_next_run(shared: InRedis) -> None:
    old = shared.open(Joining("shop", "monday"))
    push(old, "a")
    assert names(old, 1) == ["a"]
    new = shared.open(Joining("shop", "tuesday"))
    assert old.apply(Batch(want=1)).is_retired
    assert names(new, 1) == []
    old.close()
    assert names(new, 1) == ["a"]


def test_a_reply_is_lost_and_another_run_begins(shared: InRedis) -> None:
    """What the lost batch has taken is in flight, though the worker is retired now."""
    old = shared.open(Joining("shop", "monday"))
    push(old, "a")
    old.apply(batch := Batch([page("b")], want=1))
    shared.open(Joining("shop", "tuesday"))
    old._number -= 1
    reply = old.apply(batch)
    assert (reply.queued, len(reply.taken), reply.is_retired) == ([True], 1, False)
    reply = old.apply(batch)
    assert (reply.queued, reply.taken, reply.is_retired) == ([False], [], True)


def test_two_names_at_once(shared: InRedis) -> None:
    """The later one wins; neither takes over from the other again and again."""
    first, second = shared.make(), shared.make()
    assert first.open(Joining("shop", "a")).began
    opened = second.open(Joining("shop", "b"))
    assert (opened.began, opened.is_first) == (True, False)
    for _ in range(3):
        assert first.apply(Batch(want=1)).is_retired
        assert not second.apply(Batch(want=1)).is_retired
    late = shared.make()
    opened = late.open(Joining("shop", "a"))
    assert (opened.is_late, opened.run, opened.began) == (True, "b", False)
    assert late.apply(Batch(want=1, may_start=True)).is_retired
    late.close()
    assert not second.apply(Batch(want=1)).is_retired
    assert shared.state().run == "b"


def test_a_late_worker_takes_nothing_and_changes_nothing(shared: InRedis) -> None:
    shared.open(Joining("shop", "monday")).close()
    current = shared.open(Joining("shop", "tuesday"))
    push(current, "a")
    failed_page(current, "kept")
    for _ in range(5):  # a container that is started again and again
        late = shared.make()
        opened = late.open(Joining("shop", "monday"))
        assert (opened.is_late, opened.retried) == (True, 0)
        reply = late.apply(Batch(want=5, may_start=True, is_over=True))
        assert (reply.taken, reply.is_retired, reply.runs_start) == ([], True, False)
        late.close()
    assert names(current, 5) == ["a"]
    assert current.counts()[State.FAILED] == 1


def failed_page(worker: RedisStore, name: str) -> None:
    """Crawl a page, which fails."""
    enter(worker, page(name, priority=9))
    failed(worker, taken(worker))


def test_failed_requests_are_tried_again_in_slices(shared: InRedis) -> None:
    """By whatever worker of the run, while others crawl; each reply says that some are left."""
    number, at_once = 2000, 40
    worker = shared.open(Joining("shop", "1"))
    pages = [page(str(each)) for each in range(number)]
    for start in range(0, number, at_once):
        some = pages[start : start + at_once]
        taken_ones = worker.apply(Batch(some, want=at_once)).taken
        worker.apply(Batch(ended=[Ended(each.id, End.FAILED, "x" * 200) for each in taken_ones]))
    assert worker.counts()[State.FAILED] == number
    assert {len(each.reason) for each in shared.queue().requests(State.FAILED)} == {200}
    workers = [shared.make() for _ in range(2)]
    opened = [worker.open(Joining("shop", "2")) for worker in workers]
    assert [each.retried for each in opened] == [number, number]
    crawled, batches = 0, 0
    while crawled < number:
        reply = workers[batches % 2].apply(Batch(want=16))
        assert reply.left == number - crawled
        assert reply.pending <= 100 * (2 * batches + 1)
        assert all(each.tries == 1 for each in reply.taken)
        assert batches < number
        done(workers[batches % 2], *reply.taken)
        crawled += len(reply.taken)
        batches += 1
    assert workers[0].apply(Batch()).left == 0
    assert not any(workers[0].counts().values())


WAITING = 1000


def test_rows_end_in_slices_when_the_page_is_done_for_which_they_wait(shared: InRedis) -> None:
    worker, other = shared.open(), shared.open()
    enter(worker, page("login"))
    login = taken(worker)
    for start in range(0, WAITING, 40):
        enter(worker, *(page(str(each)) for each in range(start, start + 40)))
        found = worker.apply(Batch(want=40)).taken
        to_login = [page("login")._replace(replaces=each.id) for each in found]
        assert enter(worker, *to_login) == [False] * 40
    assert worker.counts()[State.WAITING] == WAITING
    assert worker.apply(Batch()).left == 1
    push(worker, "next")
    reply = worker.apply(Batch(ended=[Ended(login.id)], want=1))
    assert len(reply.taken) == 1  # there is time for both
    numbers = [worker.counts()[State.WAITING]]
    done(worker, *reply.taken)
    numbers.append(worker.counts()[State.WAITING])
    while (reply := other.apply(Batch())).left:  # by whatever worker
        numbers.append(other.counts()[State.WAITING])
    steps = [before - after for before, after in pairwise([WAITING, *numbers, 0])]
    assert max(steps) <= 100
    assert reply.counters == (WAITING + 2, WAITING + 2)
    assert not any(other.counts().values())


def test_waiting_rows_are_tried_again_in_slices(shared: InRedis) -> None:
    worker = shared.open(Joining("shop", "1"))
    enter(worker, page("login"))
    login = taken(worker)
    for start in range(0, WAITING, 40):
        enter(worker, *(page(str(each)) for each in range(start, start + 40)))
        for each in worker.apply(Batch(want=40)).taken:
            replaced(worker, each, page("login"))
    failed(worker, login)
    worker = shared.make()
    assert worker.open(Joining("shop", "2")).retried == WAITING + 1
    reply = worker.apply(Batch())
    assert (reply.pending, reply.left) == (100, WAITING + 1)
    while reply.pending < reply.left:
        reply = worker.apply(Batch())
    assert worker.counts()[State.PENDING] == WAITING + 1
    worker.close()
    assert {each.tries for each in shared.queue().requests(State.PENDING)} == {1}


def test_waiting_and_failed_rows_end_if_the_worker_does_not_keep_it(shared: InRedis) -> None:
    keeping, other = shared.open(), shared.open(replace(SHOP, keeps_failed=False))
    for name in "ab":
        enter(keeping, page(name))
    failed(other, taken(other))
    failed(keeping, taken(keeping))
    assert keeping.counts()[State.FAILED] == 1
    assert enter(keeping, page("a"), page("b")) == [False, False]


def test_openings_without_a_run_name_count_as_tries_once_an_hour(shared: InRedis) -> None:
    tries = []
    for since in (0, 10, 3700, -10, 0):
        worker = shared.open()
        if not tries:
            failed_page(worker, "page")
            worker.close()
            worker = shared.open()
        found = taken(worker)
        tries.append(found.tries)
        failed(worker, found)
        worker.close()
        now = round(1000 * shared.server.now())
        shared.server.send("HSET", shared.key, "tried_at", now - 1000 * since)
    assert tries == [0, 0, 0, 1, 2]


def test_what_a_worker_had_under_its_former_id_has_no_effect(shared: InRedis) -> None:
    """Ordinary requests of the same batch enter."""
    worker, other = shared.open(), shared.open()
    enter(worker, page("a"), page("b"))
    first, second = taken(worker), taken(worker)
    shared.lapse(worker)
    other.apply(Batch())
    retry = page("a", is_filtered=False)._replace(replaces=first.id)
    batch = Batch([retry, page("child")], ended=[Ended(second.id, End.FAILED)])
    with pytest.raises(RejoinedError):
        worker.apply(batch)
    assert worker.apply(batch).queued == [False, True]
    assert shared.counts() == (3, 0)


def test_a_finished_run_tries_failed_requests_again_only_without_other_workers(
    shared: InRedis,
) -> None:
    first = shared.open()
    started(first)
    failed_page(first, "page")
    assert first.apply(Batch(is_over=True)).ended_at
    second = shared.make()
    opened = second.open(SHOP)
    assert (opened.retried, bool(opened.ended_at), opened.others) == (0, True, 1)
    assert not second.apply(Batch(want=1)).taken
    first.close()
    second.close()
    third = shared.make()
    opened = third.open(SHOP)
    assert (opened.retried, opened.ended_at, opened.counts[State.FAILED]) == (1, 0, 1)
    reply = third.apply(Batch(want=1, may_start=True))
    assert ([name_of(each) for each in reply.taken], reply.left) == (["page"], 1)
    assert not reply.runs_start  # the run's start() has ended
    assert (reply.is_started, reply.ended_at) == (True, 0)


def test_a_command_begins_no_run(shared: InRedis) -> None:
    """Such as `scrapy bloom add`, which may be there before the first crawl, and afterwards."""
    command = shared.make()
    opened = command.open(Joining("shop", is_crawl=False))
    assert (opened.run, opened.began, opened.is_first, command.run) == ("", False, False, b"")
    start = page("start", once=True)
    assert enter(command, page("a"), start, start) == [True, True, False]
    crawl = shared.make()
    assert crawl.open(Joining("shop", "monday")).began
    reply = command.apply(Batch([page("a"), page("b")]))
    assert (reply.queued, reply.is_retired, command.run) == ([False, True], False, crawl.run)
    assert sorted(names(crawl, 9)) == ["a", "b", "start"]
    shared.server.send("DEL", shared.key)
    for _ in range(2):  # whoever finds it lost: the command begins no run then, either
        with pytest.raises(RejoinedError):
            command.apply(Batch())
        shared.server.send("DEL", shared.key)
    assert shared.make().open(Joining("shop", is_crawl=False)).run == ""


def test_a_command_has_nothing_tried_again(shared: InRedis) -> None:
    worker = shared.open()
    started(worker)
    failed_page(worker, "page")
    worker.close()
    command = shared.make()
    assert command.open(Joining("shop", is_crawl=False)).retried == 0
    assert command.apply(Batch()).pending == 0
    command.close()
    assert shared.make().open(SHOP).retried == 1


def test_unreadable_requests_are_pending_again_only_without_other_workers(shared: InRedis) -> None:
    worker = shared.open()
    push(worker, "page")
    unreadable(worker, taken(worker))
    other = shared.open()
    assert names(other, 1) == []
    worker.close()
    other.close()
    assert names(shared.open(), 1) == ["page"]
