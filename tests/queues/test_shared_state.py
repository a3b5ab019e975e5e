"""How a shared queue stands, as `scrapy bloom info` tells it; and its removal."""

import os
import socket
import time

import pytest

from request_queues import InRedis, push
from scrapy_bloom import StorageError
from scrapy_bloom.queues import redis as shared_requests
from scrapy_bloom.queues.members import keys_of_queue
from scrapy_bloom.queues.shared_state import read_state, remove_queue


def test_how_it_stands(shared: InRedis) -> None:
    assert read_state(shared.server, shared.key) is None
    first, second = shared.open(), shared.open()
    for name in "abcd":
        push(first, name)
    taken = first.take()
    state = shared.state()
    assert (state.pending, state.done, state.set_aside, state.waiting) == (3, 0, 0, 4)
    assert (state.is_started, state.ended_at) == (False, 0.0)
    assert {each.name for each in state.workers} == {f"{socket.gethostname()}:{os.getpid()}"}
    workers = {each.id: (each.is_alive, each.in_flight) for each in state.workers}
    assert workers == {first._worker.decode(): (True, 1), second._worker.decode(): (True, 0)}
    first.set_aside(taken.id)
    shared.lapse(second)
    state = shared.state()
    assert (state.in_flight, state.set_aside, state.waiting) == (0, 1, 4)
    workers = {each.id: each.is_alive for each in state.workers}
    assert workers == {first._worker.decode(): True, second._worker.decode(): False}
    assert first.claim_start()
    assert not shared.state().is_started
    first.end_start(first.id, is_through=True)
    assert shared.state().is_started
    while request := first.take():
        first.done(request.id)
        first._look_again = 0.0
    state = shared.state()
    assert (state.pending, state.done, state.in_flight) == (0, 3, 0)
    seconds, microseconds = shared.server.send("TIME")
    assert 0 <= int(seconds) + int(microseconds) / 1e6 - state.ended_at < 600
    assert first.ended_at == state.ended_at
    first.close()
    assert first.ended_at == state.ended_at


def test_a_worker_without_a_name(shared: InRedis) -> None:
    first = shared.open()
    name = first._worker + b":name"
    shared.server.send("HSET", shared.keys[2], name, b"host\xff:1")
    assert [each.name for each in shared.state().workers] == [r"host\xff:1"]
    shared.server.send("HDEL", shared.keys[2], name)
    assert [each.name for each in shared.state().workers] == ["?"]


def test_it_is_removed(shared: InRedis) -> None:
    push(shared.open(), "a")
    *keys, of_filter = keys_of_queue(shared.key)
    shared.server.send("HSET", of_filter, "queue", "1", "other", "2")
    assert read_state(shared.server, shared.key)
    remove_queue(shared.server, shared.key)
    assert read_state(shared.server, shared.key) is None
    assert [shared.server.send("EXISTS", key) for key in keys] == [0, 0, 0, 0]
    assert list(shared.server.send("HGETALL", of_filter)) == [b"other"]


def test_one_that_was_flushed_is_none(shared: InRedis) -> None:
    shared.open()
    shared.server.send("HSET", shared.keys[3], "flushed", "1")
    assert read_state(shared.server, shared.key) is None


def test_a_server_that_ends_each_lease_at_once_is_told_of(
    shared: InRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = shared.open()
    rejoined = []
    rejoin = queue._rejoin

    def ends_at_once() -> None:
        rejoined.append(1)
        rejoin()
        shared.server.send("HDEL", shared.keys[2], queue._worker)

    monkeypatch.setattr(queue, "_rejoin", ends_at_once)
    shared.server.send("HDEL", shared.keys[2], queue._worker)
    with pytest.raises(StorageError, match="ends each lease at once"):
        push(queue, "a")
    assert len(rejoined) == shared_requests._MOST_REJOINS == 10


def test_the_server_is_told_before_more_are_in_flight_than_may_be(
    shared: InRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = shared.connect(), shared.connect()
    options = {"by_slot": False, "lease_secs": 600.0, "most_in_flight": 2, "prefetch": 4}
    queue = shared_requests.SharedRequests(*servers, shared.key, **options)
    asked: list[int] = []
    ask = queue._ask
    monkeypatch.setattr(
        queue, "_ask", lambda active: (asked.append(len(queue._slots)), ask(active))
    )
    for name in "abcdefgh":
        push(queue, name)
    for _ in range(4):
        assert queue.take()
    assert asked == [0, 2, 3]
    queue._lease.end()


def test_an_empty_queue_is_not_asked_again_at_once(shared: InRedis) -> None:
    queue = shared.open()
    before = time.monotonic()
    assert queue.take() is None
    assert queue._look_again >= before + 0.25


def test_what_is_not_held_is_not_removed(shared: InRedis) -> None:
    queue = shared.open()
    push(queue, "a")
    taken = queue.take()
    queue.done((b"a former self", taken.id[1]))
    queue.set_aside((b"a former self", taken.id[1]))
    assert not queue._done
    assert shared.counts() == (0, 1)
    queue.done(taken.id)
    queue.done(taken.id)
    assert queue._done == [taken.id[1]]
