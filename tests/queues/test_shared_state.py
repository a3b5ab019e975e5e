"""The figures of a queue in Redis, as `scrapy bloom info` prints them, and its removal."""

import os
import socket

from scrapy_bloom.queues.store import Batch, Joining, State
from tests.support.request_queues import (
    InRedis,
    done,
    enter,
    failed,
    page,
    push,
    take,
    taken,
    unreadable,
)


def test_figures_of_a_queue(shared: InRedis) -> None:
    assert shared.queue().find() is None
    shared.filter()
    assert shared.queue().find() is None
    first, second = shared.open(Joining("shop", "monday")), shared.open()
    for name in "abcd":
        push(first, name)
    request = taken(first)
    state = shared.state()
    assert (state.spider, state.run) == ("shop", "monday")
    assert (state.counts[State.PENDING], state.counts[State.IN_FLIGHT]) == (3, 1)
    assert (state.total, state.done, state.is_started, state.ended_at) == (4, 0, False, 0.0)
    assert {worker.name for worker in state.workers} == {f"{socket.gethostname()}:{os.getpid()}"}
    workers = {worker.id: (worker.is_alive, worker.in_flight) for worker in state.workers}
    assert workers == {
        first.worker.decode(): (True, 1),
        second.worker.decode(): (True, 0),
    }
    unreadable(first, request)
    first.apply(Batch(may_start=True))
    shared.lapse(second)
    state = shared.state()
    assert (state.counts[State.IN_FLIGHT], state.counts[State.UNREADABLE], state.total) == (0, 1, 4)
    assert [worker.id for worker in state.live_workers] == [first.worker.decode()]
    first.apply(Batch(start_ended=True))
    assert shared.state().is_started
    while request := take(first):
        done(first, request)
    first.apply(Batch(is_over=True))
    state = shared.state()
    assert (state.counts[State.PENDING], state.done, state.counts[State.UNREADABLE]) == (0, 3, 1)
    assert 0 <= shared.server.now() - state.ended_at < 600


def test_a_worker_without_a_name(shared: InRedis) -> None:
    name = shared.open().worker + b":name"
    shared.server.send("HSET", shared.keys["workers"], name, b"host\xff:1")
    assert [worker.name for worker in shared.state().workers] == [r"host\xff:1"]
    shared.server.send("HDEL", shared.keys["workers"], name)
    assert [worker.name for worker in shared.state().workers] == ["?"]


def test_requests_are_moved_while_workers_use_the_queue(shared: InRedis) -> None:
    store, number = shared.open(), 250
    pages = [page(str(n), slot=f"{n % 2}", newest_first=False) for n in range(number)]
    for start in range(0, number, 50):
        enter(store, *pages[start : start + 50])
        for request in store.apply(Batch(want=50)).taken:
            failed(store, request)
    push(store, "pending", slot="1")
    taken(store)
    queue = shared.queue()
    assert queue.move(State.FAILED, None, "0") == number / 2
    assert queue.move(State.FAILED, State.PENDING) == number / 2
    assert queue.counts()[State.FAILED] == 0
    assert queue.slots() == {"1": number / 2}
    assert store.apply(Batch()).counters == (number + 1, number / 2)
    assert len(store.apply(Batch(want=number)).taken) == 100  # as many as a script may move
    assert queue.move(State.PENDING, None, "0") == 0
    assert queue.move(State.PENDING, None, "1") == number / 2 - 100
    assert store.apply(Batch()).unfinished == 101


def test_it_is_removed(shared: InRedis) -> None:
    push(shared.open(), "a")
    assert shared.queue().find()
    shared.queue().remove()
    assert shared.queue().find() is None
    assert not any(shared.server.send("EXISTS", key) for key in list(shared.keys.values())[1:])
    names = set(shared.server.send("HGETALL", shared.key))
    assert names == {b"id", b"version", b"filter", b"gen:1", b"count:1"}
    assert shared.server.send("EXISTS", shared.keys["runs"]) == 0
    push(shared.open(), "b")
    assert shared.state().counts[State.PENDING] == 1
