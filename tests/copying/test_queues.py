"""Copying a queue with its filter: the same requests in the same order, or nothing at all."""

from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from scrapy_bloom import LockedError, StorageError
from scrapy_bloom.commands.shared.places import RedisPlace
from scrapy_bloom.job.jobdir import lock_job
from scrapy_bloom.queues.redis_queue import RedisQueue
from scrapy_bloom.queues.sqlite_queue import SQLiteQueue
from scrapy_bloom.queues.sqlite_store import SQLiteStore
from scrapy_bloom.queues.store import Entered, Row, State
from scrapy_bloom.redis.layout import keys_of
from tests.support import servers
from tests.support.backends import local_backend
from tests.support.copies import copy
from tests.support.redis_filters import PLACES
from tests.support.request_queues import (
    InRedis,
    begun,
    done,
    enter,
    failed,
    page,
    push,
    replaced,
    take,
    taken,
    unreadable,
)
from tests.support.workspace import FINGERPRINTER, contents


def make_job(job: Path, number: int = 60) -> None:
    """A closed job, with requests of three hosts, and with all kinds of priorities."""
    backend = local_backend(
        job / "bloom", capacity=2000, error_rate=1e-6, fingerprinter=FINGERPRINTER, spider="shop"
    )
    backend.open()
    backend.begin()
    backend.add(b"page")
    backend.close()
    queue = local(job)
    for each in range(number):
        rank = (0, 1, -1)[each % 7 % 3]
        request = Entered(
            b"request %d" % each + b"\xff\x00" * (each % 3),
            slot=f"host{each % 3}.example",
            priority=(0, 5, -(2**63), 2**63, -7)[each % 5],
            rank=rank,
            newest_first=rank != 1,
        )
        enter(queue, request)
    queue.close()


def local(job: Path) -> SQLiteStore:
    return begun(job / "requests.sqlite", by_slot=True)


def emptied(queue: Any) -> list[bytes]:
    found = []
    while taken := take(queue):
        found.append(taken.data)
        done(queue, taken)
    return found


@pytest.mark.parametrize("place", PLACES)
def test_up_and_down_again_in_order(place: str, key: str, tmp_path: Path) -> None:
    make_job(tmp_path / "one")
    shared = InRedis(place, key)
    there = RedisPlace.on(shared.server, key)
    assert copy(tmp_path / "one", there).queued == 60
    state = shared.state()
    assert (state.total, state.done, state.crawl) == (60, 0, "shop")
    assert shared.server.send("HGET", key, "pushed") == b"60"
    assert copy(there, tmp_path / "two/bloom").queued == 60
    assert copy(tmp_path / "two/bloom", tmp_path / "three").queued == 60
    assert not list(tmp_path.glob("*.unfinished-copy"))
    again = InRedis(place, f"{key}:again")
    assert copy(there, RedisPlace.on(again.server, again.key)).queued == 60
    expected = emptied(local(tmp_path / "one"))
    assert len(expected) == 60
    for job in ("two", "three"):
        assert emptied(local(tmp_path / job)) == expected
    for each in (shared, again):
        assert emptied(each.open(by_slot=True)) == expected
        each.end()


def test_a_queue_of_which_requests_are_done(shared: InRedis, key: str, tmp_path: Path) -> None:
    """The next requests are queued after those that were copied."""
    make_job(tmp_path / "one")
    queue = local(tmp_path / "one")
    for _ in range(20):
        done(queue, take(queue))
    queue.close()
    assert copy(tmp_path / "one", RedisPlace.on(shared.server, key)).queued == 40
    state = shared.state()
    assert (state.total, state.done) == (40, 20)
    push(worker := shared.open(), "later", newest_first=False)
    assert len(emptied(worker)) == 41


def kept(place: SQLiteQueue | RedisQueue) -> list[Row]:
    """The rows that are not pending, without their positions and epochs."""
    states = [state for state in State if state is not State.PENDING]
    rows = [row for state in states for row in place.requests(state)]
    return sorted((replace(row, position=0, epoch=0) for row in rows), key=lambda row: row.data)


def test_rows_of_all_states_go_along(shared: InRedis, key: str, tmp_path: Path) -> None:
    make_job(tmp_path / "one", 0)
    queue = begun(tmp_path / "one/requests.sqlite")
    names = ["failed", "waits", "hop", "suspect", "unreadable", "pending"]
    enter(queue, *(page(name, rank=number, priority=2**63) for number, name in enumerate(names)))
    found = [taken(queue) for _ in names]
    failed(queue, found[0], "503")
    assert replaced(queue, found[2], page("target", slot="b", rank=-9, newest_first=False))
    assert not replaced(queue, found[1], page("target"))
    unreadable(queue, found[4])
    queue.close()
    there = RedisPlace.on(shared.server, key)
    assert copy(tmp_path / "one", there).queued == 6
    assert copy(there, tmp_path / "two").queued == 6
    one, two = (SQLiteQueue(tmp_path / name / "requests.sqlite") for name in ("one", "two"))
    expected = {State.PENDING: 4, State.WAITING: 1, State.FAILED: 1}
    for place in (two, shared.queue()):
        assert {state: number for state, number in place.counts().items() if number} == expected
        assert kept(place) == [each for each in kept(one) if each.state in expected]
    assert [*two.requests(State.PENDING)] == [*shared.queue().requests(State.PENDING)]
    for store in (local(tmp_path / "two"), shared.open()):
        assert len(emptied(store)) == 6
        assert not any(store.counts().values())
        store.close()


def test_no_copy_while_workers_live(shared: InRedis, key: str, tmp_path: Path) -> None:
    make_job(tmp_path / "one")
    there = RedisPlace.on(shared.server, key)
    copy(tmp_path / "one", there)
    worker = shared.open()
    assert take(worker)
    for target in (tmp_path / "two", RedisPlace.on(shared.server, f"{key}:two")):
        with pytest.raises(
            StorageError, match=r"1 worker \(.*\) uses the queue .* nothing was copied"
        ):
            copy(there, target)
    assert not (tmp_path / "two").exists()
    assert not servers.shared("valkey").client.keys(f"*{key}:two*")
    shared.lapse(worker)
    assert copy(there, tmp_path / "two").queued == 60
    assert local(tmp_path / "two").pending == 60


def test_no_copy_of_a_queue_that_a_worker_uses_meanwhile(
    shared: InRedis, key: str, tmp_path: Path
) -> None:
    """A request moves to a set that was read already: the copy would lack it."""
    make_job(tmp_path / "one", 250)
    there = RedisPlace.on(shared.server, key)
    copy(tmp_path / "one", there)
    requests = there.source().requests()
    next(requests)  # those in flight were read before, and a hundred of the pending ones
    worker = shared.open(by_slot=True)
    assert all(take(worker) for _ in range(3))  # one of each host
    assert len(list(islice(requests, 200))) == 200
    shared.leave(worker)
    with pytest.raises(StorageError, match="a worker has used the queue .* meanwhile"):
        list(requests)


def test_nothing_is_left_of_a_copy_that_failed(shared: InRedis, key: str, tmp_path: Path) -> None:
    make_job(tmp_path / "one")
    there = RedisPlace.on(shared.server, key)
    lock = lock_job(tmp_path / "one")
    with pytest.raises(LockedError):
        copy(tmp_path / "one", there)
    lock.release()
    client = servers.shared("valkey").client
    assert not client.keys(f"*{key}*")
    copy(tmp_path / "one", there)
    before = sorted(client.keys(f"*{key}*"))
    with pytest.raises(StorageError, match="has a filter"):
        copy(tmp_path / "one", there)
    assert sorted(client.keys(f"*{key}*")) == before
    assert all(client.ttl(each) == -1 for each in before)
    names = keys_of(key)
    assert {*names[:2]} < {each.decode() for each in before}
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    files = contents(tmp_path)
    for target in ("one", "one/bloom", "file", "link"):
        with pytest.raises(StorageError, match="exists already; nothing was changed"):
            copy(there, tmp_path / target)
    assert contents(tmp_path) == files
    (id_, *_) = client.hkeys(shared.keys["rows"])
    client.hset(shared.keys["rows"], id_, b"zzz of somebody else")
    for target in (tmp_path / "new/two", RedisPlace.on(shared.server, f"{key}:two")):
        with pytest.raises(StorageError, match="is not a request of CrashSafeScheduler"):
            copy(there, target)
    assert not (tmp_path / "new").exists()
    assert not client.keys(f"*{key}:two*")
