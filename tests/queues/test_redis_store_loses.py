"""A shared queue on a server that loses it, in whole or in part, or is rolled back."""

from collections.abc import Iterator

import pytest

from scrapy_bloom.queues.redis_store import RedisStore
from scrapy_bloom.queues.store import Batch, Joining, RejoinedError
from scrapy_bloom.redis.layout import block_key
from tests.support import servers
from tests.support.request_queues import (
    InRedis,
    done,
    enter,
    failed,
    name_of,
    names,
    page,
    push,
    taken,
    unreadable,
)


@pytest.fixture
def own(server: servers.Server) -> Iterator[InRedis]:
    """A queue on a server of its own."""
    store = InRedis("valkey", "shop:bloom", url=server.url)
    yield store
    store.end()


def roll_back(server: servers.Server) -> None:
    """Restart it with the state that it saved last."""
    server.kill()
    server.start()


def drained(*workers: RedisStore) -> list[str]:
    """Take all there is, in turn, and have it done; in the order of names."""
    found: list[str] = []
    while some := [name for worker in workers for name in crawled(worker)]:
        found += some
    return sorted(found)


def crawled(worker: RedisStore) -> list[str]:
    try:
        found = worker.apply(Batch(want=1)).taken
    except RejoinedError:
        found = worker.apply(Batch(want=1)).taken
    done(worker, *found)
    return [name_of(entry) for entry in found]


@pytest.mark.parametrize("command", ["flushall", "delete"])
def test_all_is_lost(command: str, own: InRedis, server: servers.Server) -> None:
    worker = own.open()
    enter(worker, page("a"))
    if command == "flushall":
        server.client.flushall()
    else:
        server.client.delete(own.key)
    with pytest.raises(RejoinedError):
        push(worker, "b")
    assert names(worker, 2) == []  # whatever was left of the queue is gone
    assert is_new(worker, "a")
    if command == "flushall":
        server.client.flushall()
    else:
        server.client.delete(own.key)
    assert worker.close() is None  # without an error


def is_new(worker: RedisStore, name: str) -> bool:
    return worker.apply(Batch([page(name)])).queued == [True]


@pytest.mark.parametrize(
    "name", ["rows", "pending", "leased", "suspects", "kept", "dead", "unreadable", "block"]
)
def test_evicted_keys_are_noticed(
    name: str, own: InRedis, server: servers.Server, caplog: pytest.LogCaptureFixture
) -> None:
    worker = own.open()
    for char in "abcdef":
        enter(worker, page(char))
    unreadable(worker, taken(worker))
    failed(worker, taken(worker))
    taken(worker)
    for place in ("dead", "suspects"):
        (member,) = server.client.zrange(own.keys["pending"], 0, 0)
        server.client.zadd(own.keys[place], {member: 0})
        server.client.zrem(own.keys["pending"], member)
    assert all(
        server.client.zcard(own.keys[each_name]) for each_name in ("pending", "leased", "suspects")
    )
    block = block_key(own.key, own.filter().live[0].id, 0)
    server.client.delete(own.keys.get(name, block))
    with pytest.raises(RejoinedError), caplog.at_level("WARNING"):
        enter(worker, page("e"))
    assert "was lost: removed, flushed, evicted" in caplog.text
    assert is_new(worker, "a")  # the rest was removed


def test_requests_of_a_server_that_is_rolled_back_are_crawled_again(
    own: InRedis, server: servers.Server
) -> None:
    """What was in flight when the state was saved, and is done since."""
    workers = [own.open() for _ in range(2)]
    for number in range(8):
        enter(workers[0], page(str(number)))
    requests = [taken(worker) for worker in workers]
    server.client.save()
    for worker, request in zip(workers, requests, strict=True):
        done(worker, request)
    enter(workers[0], page("new"))
    assert len(drained(*workers)) == 7
    roll_back(server)
    for worker in workers:
        with pytest.raises(RejoinedError):
            worker.apply(Batch())
    assert drained(*workers) == [str(number) for number in range(8)]
    assert is_new(workers[0], "new")  # nobody takes it for seen
    assert own.counts() == (1, 0)


def test_requests_without_a_parent_are_returned_to_be_sent_again(own: InRedis) -> None:
    """Only of the batches that the server has lost, and only those that were queued."""
    worker = own.open()
    alone = [page(char)._replace(has_parent=False) for char in "abc"]
    enter(worker, alone[0])
    enter(worker, alone[0], alone[1], page("with a parent"))
    enter(worker, alone[2]._replace(context="of the crawl"))
    own.server.send("HSET", own.keys["workers"], worker.worker + b":number", 1)
    with pytest.raises(RejoinedError) as caught:
        worker.apply(Batch())
    assert caught.value.lost == alone[1:]
    own.server.send("DEL", own.key)
    with pytest.raises(RejoinedError) as caught:
        worker.apply(Batch())
    assert caught.value.lost == alone[:1]


def test_an_older_state_in_which_the_crawl_was_not_over(
    own: InRedis, server: servers.Server
) -> None:
    worker = own.open()
    worker.apply(Batch(may_start=True))
    enter(worker, page("a"))
    worker.apply(Batch(start_ended=True))
    server.client.save()
    assert drained(worker) == ["a"]
    assert worker.apply(Batch(is_over=True)).ended_at
    roll_back(server)
    assert drained(worker) == ["a"]
    assert not worker.apply(Batch()).ended_at
    assert worker.apply(Batch(is_over=True)).ended_at


# Runs.


def test_a_run_that_the_server_has_lost_begins_again(own: InRedis, server: servers.Server) -> None:
    """With the same id, for all its workers; a worker of an earlier run does not end it."""
    straggler = own.open(Joining("shop", "monday"))
    push(straggler, "left over")
    server.client.save()
    workers = [own.open(Joining("shop", "tuesday")) for _ in range(2)]
    run, start = workers[0].run, page("start", once=True)
    assert enter(workers[0], start) == [True]
    roll_back(server)
    assert not straggler.apply(Batch()).is_retired  # it has seen nothing of the other run
    for worker in workers:
        with pytest.raises(RejoinedError):
            worker.apply(Batch())
        assert worker.run == run
    assert own.state().run == "tuesday"
    assert straggler.apply(Batch()).is_retired
    assert enter(workers[1], start) == [True]
    replies = [worker.apply(Batch(may_start=True)) for worker in workers]
    assert [(reply.runs_start, reply.is_retired) for reply in replies] == [
        (True, False),
        (False, False),
    ]
    late = own.make()
    assert late.open(Joining("shop", "monday")).is_late


@pytest.mark.parametrize("first", ["straggler", "worker"])
def test_whoever_finds_the_server_empty_the_latest_run_is_the_current_one(
    first: str, own: InRedis, server: servers.Server
) -> None:
    straggler = own.open(Joining("shop", "monday"))
    worker = own.open(Joining("shop", "tuesday"))
    server.client.flushall()
    both = [straggler, worker] if first == "straggler" else [worker, straggler]
    for entry in both:
        with pytest.raises(RejoinedError):
            entry.apply(Batch())
    assert own.state().run == "tuesday"
    assert straggler.apply(Batch()).is_retired
    assert not worker.apply(Batch()).is_retired


def test_a_retired_worker_that_finds_the_server_empty(own: InRedis, server: servers.Server) -> None:
    """It begins the run that has retired it, and stays retired."""
    old = own.open(Joining("shop", "monday"))
    new = own.open(Joining("shop", "tuesday"))
    assert old.apply(Batch()).is_retired
    server.client.flushall()
    with pytest.raises(RejoinedError):
        old.apply(Batch())
    assert own.state().run == "tuesday"
    assert old.apply(Batch(want=1)).is_retired
    with pytest.raises(RejoinedError):
        new.apply(Batch())
    assert not new.apply(Batch(want=1)).is_retired
