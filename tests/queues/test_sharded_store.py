"""A queue in several shards: one worker's batches to all of them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from scrapy_bloom.exceptions import OutageError
from scrapy_bloom.generations.policy import Origin, Policy
from scrapy_bloom.queues.batch import Found, Taken
from scrapy_bloom.queues.collected import SharedBatch
from scrapy_bloom.queues.shared import RejoinedError, SharedStore
from scrapy_bloom.queues.shared_state import read_shard
from scrapy_bloom.redis.backend import join_shards
from scrapy_bloom.redis.connection.server import RedisServer
from scrapy_bloom.redis.filter import SharedFilter
from scrapy_bloom.redis.scripts import keys_of, shard_key, shard_of
from tests.support import servers
from tests.support.request_queues import FINGERPRINTER, LONG

SHARDS = 4


class Unreliable(RedisServer):
    """A connection that may lose replies of scripts."""

    loses_after = -1  # scripts

    def script(self, *args: object, **kwargs: object) -> object:
        answer = super().script(*args, **kwargs)  # type: ignore[arg-type]
        self.loses_after -= 1
        if self.loses_after == 0:
            raise OutageError("the reply was lost")
        return answer


class Shards:
    """A queue in shards on the server of all tests, and its workers."""

    def __init__(self, key: str) -> None:
        self.keys = [shard_key(key, shard) for shard in range(SHARDS)]
        self.server = Unreliable(servers.shared("valkey").url)

    def open(self) -> SharedStore:
        policy, origin = Policy(expected=1000, error_rate=1e-9), Origin(fingerprinter=FINGERPRINTER)
        filters = [
            SharedFilter(self.server, each, policy, origin, shards=SHARDS) for each in self.keys
        ]
        join_shards(filters)
        store = SharedStore(filters, "shop", by_slot=False, lease_secs=LONG)
        store.join()
        return store

    def leased(self) -> list[int]:
        states = [read_shard(self.server, each) for each in self.keys]
        return [each.leased for each in states if each]


@pytest.fixture
def shards(tmp_path: Path) -> Iterator[Shards]:
    shards = Shards(str(tmp_path))
    yield shards
    shards.server.close()


def page(number: int) -> Found:
    return Found(b"%d" % number, b"page %d" % number)


def pages_of(shard: int, number: int) -> list[Found]:
    """So many pages of one shard."""
    all_pages = (page(each) for each in range(1000))
    found = [each for each in all_pages if shard_of(each.fingerprint or b"", SHARDS) == shard]
    return found[:number]


def take(store: SharedStore, want: int) -> list[Taken]:
    return [*store.apply(SharedBatch(want=want)).taken]


def test_answers_are_in_the_order_of_the_batch(shards: Shards) -> None:
    store = shards.open()
    store.apply(SharedBatch([page(number) for number in range(0, 20, 2)]))
    reply = store.apply(SharedBatch([page(number) for number in range(20)]))
    assert reply.queued == 10 * [False, True]
    assert reply.left == reply.pending == 20


def test_requests_that_are_not_recorded_or_not_filtered(shards: Shards) -> None:
    store = shards.open()
    pages = [page(number) for number in range(10)]
    unrecorded = [pages[number]._replace(is_recorded=False) for number in (1, 3)]
    store.apply(SharedBatch([pages[0], unrecorded[0], pages[2], unrecorded[1], *pages[4:]]))
    unfiltered = [each._replace(is_filtered=False) for each in pages[8:]]
    reply = store.apply(SharedBatch([*pages[:8], *unfiltered]))
    queued = [index for index, is_queued in enumerate(reply.queued) if is_queued]
    assert queued == [1, 3, 8, 9]
    assert reply.pending == 14


def test_requests_are_taken_wherever_they_are(shards: Shards) -> None:
    """As many as are wanted, if there are so many."""
    store = shards.open()
    store.apply(SharedBatch(pages_of(2, 30)))
    assert len(take(store, 16)) == 16
    store.apply(SharedBatch(pages_of(1, 3)))
    assert len(take(store, 16)) == 16
    assert len(take(store, 16)) == 1
    assert shards.leased() == [0, 3, 30, 0]


def test_what_is_done_waits_for_all_shards(shards: Shards) -> None:
    store = shards.open()
    store.apply(SharedBatch(pages_of(0, 1)))
    (taken,) = take(store, 1)
    batch = SharedBatch(pages_of(3, 1), done=[taken.id])
    shards.server.loses_after = 2
    with pytest.raises(OutageError):
        store.apply(batch)
    assert shards.leased()[0] == 1
    reply = store.apply(batch)
    assert (reply.left, sum(shards.leased())) == (2, 1)
    reply = store.apply(SharedBatch())
    assert (reply.left, sum(shards.leased())) == (1, 0)


def test_the_last_shard_of_a_batch_gets_what_is_done_at_once(shards: Shards) -> None:
    store = shards.open()
    store.apply(SharedBatch(pages_of(2, 1)))
    (taken,) = take(store, 1)
    reply = store.apply(SharedBatch(done=[taken.id]))
    assert (reply.left, shards.leased()) == (0, [0] * SHARDS)


def test_unsent_changes_are_sent_when_the_worker_leaves(shards: Shards) -> None:
    store, other = shards.open(), shards.open()
    store.apply(SharedBatch(pages_of(1, 1)))
    store.apply(SharedBatch(done=[each.id for each in take(store, 1)]))
    store.leave()
    assert (store.others, store.pending) == (1, 0)
    assert other.apply(SharedBatch()).left == 0


def test_a_suspect_is_taken_by_a_worker_that_has_nothing_in_any_shard(shards: Shards) -> None:
    store = shards.open()
    store.apply(SharedBatch([*pages_of(1, 1), *pages_of(3, 1)]))
    names = [keys_of(shards.keys[shard]) for shard in (1, 3)]
    (member,) = shards.server.send("ZRANGE", names[1][1], 0, -1)
    place = member.index(b"\0") + 18
    died = member[:place] + b"\3" + b"0123456789abcdef" * 3 + member[place + 1 :]
    shards.server.send("ZADD", names[1][4], 0, died)
    shards.server.send("ZREM", names[1][1], member)
    (usual,) = take(store, 5)
    assert usual.data == pages_of(1, 1)[0].data
    assert not take(store, 5)
    store.apply(SharedBatch(done=[usual.id]))
    taken = take(store, 5) or take(store, 5)
    assert [each.data for each in taken] == [pages_of(3, 1)[0].data]
    store.apply(SharedBatch(pages_of(0, 3)))
    assert not take(store, 5)  # it is alone


def test_one_shard_forgets_the_worker(shards: Shards) -> None:
    """It joins all of them again, and sends the shard again what that has lost."""
    store, other = shards.open(), shards.open()
    pages = pages_of(2, 10)
    for each in pages[:6]:
        store.apply(SharedBatch([each, *pages_of(1, 1)]))
    other.apply(SharedBatch(pages[6:8]))
    store.apply(SharedBatch([pages[6], pages[8]._replace(request="of the crawl")]))
    assert len(take(store, 9)) == 9
    shards.server.send("HSET", keys_of(shards.keys[2])[3], store.worker + b":number", 4)
    with pytest.raises(RejoinedError) as caught:
        store.apply(SharedBatch())
    assert caught.value.lost == [pages[4], pages[5], pages[8]]  # no duplicate
    assert shards.leased() == [0] * SHARDS
    assert len(take(store, 10)) == 10
