"""The figures of a queue in Redis, as `scrapy bloom info` prints them, and its removal."""

import os
import socket

import pytest

from scrapy_bloom import StorageError
from scrapy_bloom.queues.collected import SharedBatch
from scrapy_bloom.queues.shared_state import read_requests, read_state, remove_queue
from tests.support.request_queues import InRedis, done, push, take


def test_figures_of_a_queue(shared: InRedis) -> None:
    assert read_state(shared.server, shared.key) is None
    shared.filter()
    assert read_state(shared.server, shared.key) is None
    first, second = shared.open(), shared.open()
    for name in "abcd":
        push(first, name)
    taken = take(first)
    state = shared.state()
    assert (state.crawl, state.pending, state.leased, state.total) == ("shop", 3, 1, 4)
    assert (state.done, state.is_started, state.ended_at) == (0, False, 0.0)
    assert {each.name for each in state.workers} == {f"{socket.gethostname()}:{os.getpid()}"}
    workers = {each.id: (each.is_alive, each.in_flight) for each in state.workers}
    assert workers == {
        first.worker.decode(): (True, 1),
        second.worker.decode(): (True, 0),
    }
    first.apply(SharedBatch(set_aside=[taken.id], may_start=True))
    shared.lapse(second)
    state = shared.state()
    assert (state.leased, state.aside, state.total) == (0, 1, 4)
    assert [each.id for each in state.live_workers] == [first.worker.decode()]
    first.apply(SharedBatch(start_ended=True))
    assert shared.state().is_started
    while request := take(first):
        done(first, request)
    first.apply(SharedBatch(is_over=True))
    state = shared.state()
    assert (state.pending, state.done, state.aside) == (0, 3, 1)
    assert 0 <= shared.server.now() - state.ended_at < 600


def test_a_worker_without_a_name(shared: InRedis) -> None:
    name = shared.open().worker + b":name"
    shared.server.send("HSET", shared.keys["workers"], name, b"host\xff:1")
    assert [each.name for each in shared.state().workers] == [r"host\xff:1"]
    shared.server.send("HDEL", shared.keys["workers"], name)
    assert [each.name for each in shared.state().workers] == ["?"]


@pytest.mark.parametrize("name", ["pending", "leased"])
def test_its_requests(name: str, shared: InRedis) -> None:
    store = shared.open()
    for number in range(150):
        push(store, str(number), slot=f"{number % 3}")
    if name == "leased":
        while store.apply(SharedBatch(want=50)).pending:
            pass
    found = list(read_requests(shared.server, shared.key, name))
    assert {each.position for each in found} == {2**53 - number for number in range(1, 151)}
    shared.server.send("ZADD", shared.keys[name], 0, b"zzz of somebody else" * 3)
    with pytest.raises(StorageError, match="is damaged .*no request of CrashSafeScheduler"):
        list(read_requests(shared.server, shared.key, name))


def test_it_is_removed(shared: InRedis) -> None:
    push(shared.open(), "a")
    assert read_state(shared.server, shared.key)
    remove_queue(shared.server, shared.key)
    assert read_state(shared.server, shared.key) is None
    assert not any(shared.server.send("EXISTS", key) for key in list(shared.keys.values())[1:])
    names = set(shared.server.send("HGETALL", shared.key))
    assert names == {b"id", b"version", b"filter", b"gen:1", b"count:1"}
    push(shared.open(), "b")
    assert shared.state().pending == 1
