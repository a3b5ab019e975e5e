"""What only a shared queue has: workers, leases, lost replies, suspects, the end of a crawl."""

import os
import socket
from collections.abc import Callable
from typing import Any

import pytest

from scrapy_bloom.queues.batch import Found, deserialized, serialized
from scrapy_bloom.queues.collected import SharedBatch
from scrapy_bloom.queues.shared import RejoinedError, SharedStore
from scrapy_bloom.queues.shared_state import requeue
from scrapy_bloom.redis import scripts
from scrapy_bloom.redis.batch_script import BATCH
from tests.support import servers
from tests.support.proxies import DroppingProxy
from tests.support.request_queues import InRedis, done, find, name_of, names, push, set_aside, take


def started(worker: SharedStore) -> None:
    """Have a worker run the spider's start(), which yields nothing."""
    worker.apply(SharedBatch(may_start=True))
    worker.apply(SharedBatch(start_ended=True))


# Several workers.


def test_a_link_that_several_find_is_queued_once(shared: InRedis) -> None:
    found = Found(serialized({"name": "page"}), b"fingerprint")
    queued = [
        worker.apply(SharedBatch([found])).queued for worker in (shared.open(), shared.open())
    ]
    assert queued == [[True], [False]]
    assert shared.counts() == (1, 0)


def test_the_answers_are_in_the_order_of_the_batch(shared: InRedis) -> None:
    """Whether a request is queued depends on its flags, and on its fingerprint."""
    worker = shared.open()
    pages = [Found(b"%d" % number, b"page %d" % number) for number in range(10)]
    unrecorded = [pages[number]._replace(is_recorded=False) for number in (1, 3)]
    find(worker, pages[0], unrecorded[0], pages[2], unrecorded[1], *pages[4:8])
    unfiltered = [pages[number]._replace(is_filtered=False) for number in (6, 7)]
    reply = worker.apply(SharedBatch([*pages[:6], *unfiltered, *pages[8:]]))
    queued = [index for index, is_queued in enumerate(reply.queued) if is_queued]
    assert queued == [1, 3, 6, 7, 8, 9]
    assert (reply.left, reply.pending, reply.counters) == (14, 14, (14, 0))


def test_a_worker_that_leaves_gives_back_what_it_has(shared: InRedis) -> None:
    worker, other = shared.open(), shared.open()
    for number in range(10):
        push(worker, str(number), newest_first=False)
    assert names(worker, 8) == [str(number) for number in range(8)]
    worker.leave()
    assert (worker.others, worker.pending, worker.ended_at) == (1, 10, 0)
    assert shared.counts() == (10, 0)
    assert names(other, 10) == [str(number) for number in range(10)]
    other.leave()
    assert (other.others, other.pending) == (0, 10)
    assert not shared.state().workers


def test_more_is_given_back_than_one_script_may_move(shared: InRedis) -> None:
    worker = shared.open()
    find(worker, *(Found(serialized({"name": str(n)})) for n in range(500)))
    while worker.apply(SharedBatch(want=100)).taken:
        pass
    assert shared.counts() == (0, 500)
    worker.leave()
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

    def lose(self, script: str) -> None:
        self._next = script.encode()

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
        server.client.script_flush()  # so that the whole script is sent, and can be known
        proxy.lose(script[-200:])
        answer = step()
        assert proxy.dropped == before + 1
        return answer

    worker = own.open()
    lost(scripts.JOIN, worker.join)
    assert len(own.state().workers) == 1
    for name in "abcd":
        lost(BATCH, lambda name=name: push(worker, name, newest_first=False))
    assert own.counts() == (4, 0)
    reply = lost(BATCH, lambda: worker.apply(SharedBatch(want=2, may_start=True)))
    assert [name_of(each) for each in reply.taken] == ["a", "b"]
    assert reply.runs_start
    assert own.counts() == (2, 2)
    found = [Found(serialized({"name": "link"}), b"fingerprint", newest_first=False)]
    reply = lost(BATCH, lambda: worker.apply(SharedBatch(found, done=[reply.taken[0].id])))
    assert reply.queued == [True]  # as far as the worker can know
    assert (reply.left, own.state().done) == (4, 1)
    third = lost(BATCH, lambda: take(worker))
    lost(BATCH, lambda: set_aside(worker, third))
    assert lost(scripts.REQUEUE, lambda: requeue(own.server, own.key, "aside")) in {0, 1}
    assert own.counts() == (3, 1)
    lost(scripts.LEAVE, worker.leave)
    assert own.counts() == (4, 0)
    assert names(own.open(), 5) == ["b", "c", "d", "link"]
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
    reply = others[0].apply(SharedBatch(want=1))
    assert reply.expired == {f"{socket.gethostname()}:{os.getpid()}": 2}
    assert [name_of(each) for each in reply.taken] == ["0"]
    assert not others[1].apply(SharedBatch()).expired
    assert names(others[1], 9) == ["1", "4"]
    assert sorted(each.in_flight for each in shared.state().workers) == [2, 3]


def test_a_lease_that_ends_by_itself(shared: InRedis) -> None:
    """With the server's clock, and nothing but the time."""
    stopped, other = (
        SharedStore(shared.filter(), "shop", by_slot=False, lease_secs=0.5) for _ in range(2)
    )
    stopped.join()
    push(stopped, "a")
    taken = take(stopped)
    assert taken
    other.join()
    found: list[Any] = []
    servers.wait_for(lambda: bool(found.append(take(other)) or found[-1]), lambda: "not taken")
    assert name_of(found[-1]) == "a"
    with pytest.raises(RejoinedError, match="has no lease of this worker"):
        done(stopped, taken)
    done(stopped, taken)  # it goes on as another worker, to whom this token says nothing
    assert take(stopped) is None
    assert shared.state().done == 0
    done(other, found[-1])
    assert shared.state().done == 1


def test_each_batch_renews_the_lease(shared: InRedis) -> None:
    worker, other = shared.open(), shared.open()
    push(worker, "a")
    assert names(worker, 1) == ["a"]
    shared.server.send("HINCRBY", shared.keys["workers"], worker.worker, -500_000)
    worker.apply(SharedBatch())
    until = int(shared.server.send("HGET", shared.keys["workers"], worker.worker))
    assert until > 1000 * (shared.server.now() + 500)
    assert take(other) is None
    assert shared.counts() == (0, 1)


def test_leases_that_are_over_all_at_once_are_renewed_first(shared: InRedis) -> None:
    """As when the server was away for long: nobody is dead."""
    workers = [shared.open() for _ in range(2)]
    push(workers[0], "a")
    push(workers[0], "b")
    taken = [each for worker in workers if (each := take(worker))]
    for worker in workers:
        shared.lapse(worker)
    for worker in workers:
        assert take(worker) is None
    for worker, each in zip(workers, taken, strict=True):
        done(worker, each)
    assert shared.state().done == 2


def test_no_lease_lies_further_ahead_than_it_lasts(shared: InRedis) -> None:
    """As after the server's clock went back."""
    dead, other = shared.open(), shared.open()
    shared.server.send("HSET", shared.keys["workers"], dead.worker, 10**15)
    shared.server.send("HDEL", shared.key, "look")
    other.apply(SharedBatch())
    until = int(shared.server.send("HGET", shared.keys["workers"], dead.worker))
    assert until < 1000 * (shared.server.now() + 601)


# start(), and the end.


def test_one_worker_runs_start_and_another_after_its_death(shared: InRedis) -> None:
    first, second, third = (shared.open() for _ in range(3))
    may = SharedBatch(may_start=True)
    assert [each.apply(may).runs_start for each in (first, second, first)] == [True, False, True]
    shared.lapse(first)
    # Who finds it dead runs it at once.
    assert [each.apply(may).runs_start for each in (second, third)] == [True, False]
    assert not third.apply(SharedBatch(start_ended=True)).is_started  # it is not the one
    second.leave()
    assert third.apply(may).runs_start
    assert third.apply(SharedBatch(start_ended=True)).is_started
    assert not third.apply(may).runs_start


def test_the_end_is_noted_when_nothing_is_left(shared: InRedis) -> None:
    first, second = shared.open(), shared.open()
    over = SharedBatch(is_over=True)
    assert not first.apply(over).ended_at  # start() may find something
    first.apply(SharedBatch(may_start=True))
    push(first, "a")
    first.apply(SharedBatch(start_ended=True))
    taken = take(second)
    assert taken
    assert not first.apply(over).ended_at
    done(second, taken)
    assert not second.apply(SharedBatch()).ended_at  # only the second look stores it
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
    taken = take(worker)
    assert taken
    set_aside(worker, taken)
    reply = other.apply(SharedBatch(want=1, is_over=True))
    assert (reply.taken, reply.left, bool(reply.ended_at)) == ([], 0, True)
    other.leave()
    worker.leave()
    assert shared.state().aside == 1
    assert names(shared.open(), 1) == ["gone callback"]  # of a later run


# Requests that seem to kill their workers.


def die_of(shared: InRedis, times: int, watching: SharedStore, want: int = 1) -> list[str]:
    """Have workers take a request each, and die; the names of those that are dead letters then."""
    dead: list[bytes] = []
    for _ in range(times):
        worker = shared.open()
        assert len(worker.apply(SharedBatch(want=want)).taken) == want
        shared.lapse(worker)
        dead += watching.apply(SharedBatch()).died
    return [deserialized(each)["name"] for each in dead]


def test_a_request_in_three_workers_that_died_is_handed_out_alone_and_last(shared: InRedis) -> None:
    watching = shared.open()
    push(watching, "guilty")
    assert die_of(shared, 3, watching) == []
    state = shared.state()
    assert (state.pending, state.suspects) == (0, 1)
    push(watching, "innocent")
    worker = shared.open()
    reply = worker.apply(SharedBatch(want=5))
    assert [name_of(each) for each in reply.taken] == ["innocent"]
    assert not worker.apply(SharedBatch(want=5)).taken  # this worker has another one
    alone = worker.apply(SharedBatch(want=5, done=[reply.taken[0].id])).taken
    assert [name_of(each) for each in alone] == ["guilty"]
    push(watching, "later")
    assert not worker.apply(SharedBatch(want=5)).taken  # nothing next to the suspect
    shared.lapse(worker)
    died = watching.apply(SharedBatch()).died
    assert [deserialized(each)["name"] for each in died] == ["guilty"]
    state = shared.state()
    assert (state.pending, state.suspects, state.dead) == (1, 0, 1)
    assert requeue(shared.server, shared.key, "dead") == 1
    assert names(watching, 3) == ["later", "guilty"]


def test_a_suspect_is_taken_by_a_worker_whose_requests_all_wait(shared: InRedis) -> None:
    watching = shared.open()
    push(watching, "guilty")
    die_of(shared, 3, watching)
    push(watching, "waits for it")
    assert names(watching, 1) == ["waits for it"]
    assert not watching.apply(SharedBatch(want=1)).taken
    reply = watching.apply(SharedBatch(want=1, stands_still=True))
    assert [name_of(each) for each in reply.taken] == ["guilty"]


def test_only_the_suspect_that_a_worker_had_is_blamed_for_its_death(shared: InRedis) -> None:
    watching = shared.open()
    push(watching, "guilty")
    die_of(shared, 3, watching)
    push(watching, "waits for it")
    worker = shared.open()
    assert names(worker, 1) == ["waits for it"]
    assert worker.apply(SharedBatch(want=1, stands_still=True)).taken
    shared.lapse(worker)
    assert len(watching.apply(SharedBatch()).died) == 1
    assert shared.counts() == (1, 0)
    assert die_of(shared, 2, watching) == []
    assert shared.counts() == (1, 0)  # blamed twice, and not for the first death


def test_a_worker_that_comes_back_takes_the_blame_away(shared: InRedis) -> None:
    watching, stopped = shared.open(), shared.open()
    push(watching, "page")
    assert names(stopped, 1) == ["page"]
    shared.lapse(stopped)
    watching.apply(SharedBatch())
    assert die_of(shared, 2, watching) == []
    assert shared.state().suspects == 1
    with pytest.raises(RejoinedError):
        stopped.apply(SharedBatch())
    reply = stopped.apply(SharedBatch(want=1))
    reply = stopped.apply(SharedBatch(want=1)) if not reply.taken else reply
    assert [name_of(each) for each in reply.taken] == ["page"]
    shared.lapse(stopped)
    assert not watching.apply(SharedBatch()).died


def test_a_dead_letter_comes_back_with_the_worker_that_had_it(shared: InRedis) -> None:
    watching, stopped = shared.open(), shared.open()
    push(watching, "page")
    die_of(shared, 3, watching)
    assert names(stopped, 1) == ["page"]
    shared.lapse(stopped)
    assert watching.apply(SharedBatch()).died
    with pytest.raises(RejoinedError):
        stopped.apply(SharedBatch())
    state = shared.state()
    assert (state.suspects, state.dead) == (1, 0)


def test_a_worker_that_leaves_is_not_blamed(shared: InRedis) -> None:
    for number in range(5):
        worker = shared.open()
        if number == 0:
            push(worker, "page")
        assert names(worker, 1) == ["page"]
        worker.leave()
    assert shared.state().suspects == 0
