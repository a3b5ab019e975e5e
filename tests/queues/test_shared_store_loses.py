"""A shared queue on a server that loses it, in whole or in part, or is rolled back."""

from collections.abc import Iterator

import pytest

from scrapy_bloom.queues.batch import Found, serialized
from scrapy_bloom.queues.collected import SharedBatch
from scrapy_bloom.queues.shared import RejoinedError, SharedStore
from scrapy_bloom.redis.filter import LostKeysError, OtherFilterError
from scrapy_bloom.redis.scripts import block_key
from tests.support import servers
from tests.support.request_queues import InRedis, done, find, name_of, names, push, set_aside, take


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


def drained(*workers: SharedStore) -> list[str]:
    """Take all there is, in turn, and have it done; in the order of names."""
    found: list[str] = []
    while some := [name for worker in workers for name in crawled(worker)]:
        found += some
    return sorted(found)


def crawled(worker: SharedStore) -> list[str]:
    try:
        taken = worker.apply(SharedBatch(want=1)).taken
    except RejoinedError:
        taken = worker.apply(SharedBatch(want=1)).taken
    done(worker, *taken)
    return [name_of(each) for each in taken]


def found_page(name: str) -> Found:
    return Found(serialized({"name": name}), name.encode())


@pytest.mark.parametrize("command", ["flushall", "delete"])
def test_all_is_lost(command: str, own: InRedis, server: servers.Server) -> None:
    worker = own.open()
    find(worker, found_page("a"))
    if command == "flushall":
        server.client.flushall()
    else:
        server.client.delete(own.key)
    for step in (lambda: push(worker, "b"), worker.join):
        with pytest.raises(OtherFilterError, match="was removed, or lost"):
            step()
    worker.leave()  # without an error
    again = own.open()
    assert names(again, 2) == []  # whatever was left of the queue is gone
    assert is_new(again, "a")


def is_new(worker: SharedStore, name: str) -> bool:
    return worker.apply(SharedBatch([found_page(name)])).queued == [True]


@pytest.mark.parametrize("name", ["pending", "leased", "dead", "aside", "block"])
def test_evicted_keys_are_noticed(name: str, own: InRedis, server: servers.Server) -> None:
    worker = own.open()
    for each in "abcd":
        find(worker, found_page(each))
    taken = [take(worker), take(worker)]
    set_aside(worker, taken[0])
    member = server.client.zrange(own.keys["pending"], 0, 0)[0]
    server.client.zadd(own.keys["dead"], {member: 0})
    server.client.zrem(own.keys["pending"], member)
    block = block_key(own.key, own.filter().live[0].id, 0)
    server.client.delete(own.keys.get(name, block))
    with pytest.raises(LostKeysError, match="has lost keys of"):
        find(worker, found_page("e"))


def test_requests_of_a_server_that_is_rolled_back_are_crawled_again(
    own: InRedis, server: servers.Server
) -> None:
    """What was in flight when the state was saved, and is done since."""
    workers = [own.open() for _ in range(2)]
    for number in range(8):
        find(workers[0], found_page(str(number)))
    taken = [each for worker in workers if (each := take(worker))]
    server.client.save()
    for worker, each in zip(workers, taken, strict=True):
        done(worker, each)
    find(workers[0], found_page("new"))
    assert len(drained(*workers)) == 7
    roll_back(server)
    for worker in workers:
        with pytest.raises(RejoinedError):
            worker.apply(SharedBatch())
    assert drained(*workers) == [str(number) for number in range(8)]
    assert is_new(workers[0], "new")  # nobody takes it for seen
    assert own.counts() == (1, 0)


def test_requests_without_a_parent_are_returned_to_be_sent_again(own: InRedis) -> None:
    """Only of the batches that the server has lost, and only those that were queued."""
    worker = own.open()
    alone = [found_page(each)._replace(has_parent=False) for each in "abc"]
    find(worker, alone[0])
    find(worker, alone[0], alone[1], found_page("with a parent"))
    find(worker, alone[2]._replace(request="of the crawl"))
    own.server.send("HSET", own.keys["workers"], worker.worker + b":number", 1)
    with pytest.raises(RejoinedError) as caught:
        worker.apply(SharedBatch())
    assert caught.value.lost == alone[1:]
    assert worker.join() == alone[:1]


def test_an_older_state_in_which_the_crawl_was_not_over(
    own: InRedis, server: servers.Server
) -> None:
    worker = own.open()
    worker.apply(SharedBatch(may_start=True))
    find(worker, found_page("a"))
    worker.apply(SharedBatch(start_ended=True))
    server.client.save()
    assert drained(worker) == ["a"]
    assert worker.apply(SharedBatch(is_over=True)).ended_at
    roll_back(server)
    assert drained(worker) == ["a"]
    assert not worker.ended_at
    assert worker.apply(SharedBatch(is_over=True)).ended_at
