"""Copying a queue with its filter: the same requests in the same order, or nothing at all."""

from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from scrapy_bloom import StorageError
from scrapy_bloom.commands.shared.places import RedisPlace
from scrapy_bloom.copying import FileSource, RedisSource, copy_to_job
from scrapy_bloom.queues.redis_queue import RedisQueue
from scrapy_bloom.queues.sqlite_queue import SQLiteQueue
from scrapy_bloom.queues.sqlite_store import SQLiteStore
from scrapy_bloom.queues.store import Batch, Entered, Row, State
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
    killed,
    page,
    push,
    replaced,
    start_page,
    take,
    taken,
    unreadable,
)
from tests.support.workspace import FINGERPRINTER, contents


def make_job(job: Path, number: int = 60) -> None:
    """A closed job, with requests of three hosts, and with all kinds of priorities."""
    backend = local_backend(
        job, capacity=2000, error_rate=1e-6, fingerprinter=FINGERPRINTER, spider="shop"
    )
    backend.open()
    backend.begin()
    backend.add(b"page")
    backend.close()
    queue = local(job)
    for each_number in range(number):
        rank = (0, 1, -1)[each_number % 7 % 3]
        request = Entered(
            b"request %d" % each_number + b"\xff\x00" * (each_number % 3),
            slot=f"host{(1, 4, 6)[each_number % 3]}.example",  # in order of names and hashes
            priority=(0, 5, -(2**63), 2**63, -7)[each_number % 5],
            rank=rank,
            newest_first=rank != 1,
        )
        enter(queue, request)
    queue.close()


def local(job: Path) -> SQLiteStore:
    return begun(job / "bloom.sqlite")


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
    there = RedisPlace(shared.server, key)
    assert copy(tmp_path / "one", there) == 60
    state = shared.state()
    assert (state.total, state.done, state.spider) == (60, 0, "shop")
    assert shared.server.send("HGET", key, "pushed") == b"60"
    assert copy(there, tmp_path / "two") == 60
    assert copy(tmp_path / "two", tmp_path / "three") == 60
    again = InRedis(place, f"{key}:again")
    assert copy(there, RedisPlace(again.server, again.key)) == 60
    expected = emptied(local(tmp_path / "one"))
    assert len(expected) == 60
    for job in ("two", "three"):
        assert emptied(local(tmp_path / job)) == expected
    for entry in (shared, again):
        assert emptied(entry.open()) == expected
        entry.end()


def test_a_running_job_is_copied_as_of_one_moment(tmp_path: Path) -> None:
    make_job(tmp_path / "one")
    crawl = local(tmp_path / "one")
    in_flight = taken(crawl)
    with closing(FileSource(tmp_path / "one")) as source:
        done(crawl, in_flight, taken(crawl))
        push(crawl, "later")
        assert copy_to_job(source, tmp_path / "two") == 60
    crawl.close()
    found = emptied(local(tmp_path / "two"))
    assert len(found) == 60
    assert in_flight.data in found
    assert copy(tmp_path / "one", tmp_path / "three") == 59


def test_a_queue_of_which_requests_are_done(shared: InRedis, key: str, tmp_path: Path) -> None:
    """The next requests are queued after those that were copied."""
    make_job(tmp_path / "one")
    queue = local(tmp_path / "one")
    for _ in range(20):
        done(queue, take(queue))
    queue.close()
    assert copy(tmp_path / "one", RedisPlace(shared.server, key)) == 40
    state = shared.state()
    assert (state.total, state.done) == (40, 20)
    push(worker := shared.open(), "later", newest_first=False)
    assert len(emptied(worker)) == 41


def rows(queue: SQLiteQueue | RedisQueue) -> list[Row]:
    """All rows, by their data, as far as a copy has to keep them."""
    found = []
    for row in (row for state in State for row in queue.requests(state)):
        state = State.PENDING if row.state is State.UNREADABLE else row.state
        deaths = 0 if row.state is State.DEAD else row.deaths
        found.append(row._replace(id=0, state=state, deaths=deaths, takes=row.was_taken))
        found[-1] = found[-1]._replace(position=row.newest_first, epoch=0)
    return sorted(found, key=lambda row: row.data)


def test_rows_of_all_states_go_along(shared: InRedis, key: str, tmp_path: Path) -> None:
    """With all columns; what failed or waits in a copy is tried again, as of an earlier run."""
    make_job(tmp_path / "one", 0)
    path = tmp_path / "one/bloom.sqlite"
    queue = begun(path)
    for entered in ([page("dead")], [], [], [], [page("blamed")]):
        enter(queue, *entered)
        taken(queue)
        killed(queue)
        queue = begun(path)
    names = ["failed", "waits", "hop", "in flight", "unreadable", "pending"]
    enter(queue, *(page(name, rank=number, priority=2**63) for number, name in enumerate(names)))
    enter(queue, start_page("start", slot="c"), page("link", newest_first=False))
    found = [taken(queue) for _ in names]
    failed(queue, found[0], "\ud800 503")
    assert replaced(queue, found[2], page("target", slot="b", rank=-9, newest_first=False))
    assert not replaced(queue, found[1], page("target"))
    unreadable(queue, found[4])
    queue.close()
    there = RedisPlace(shared.server, key)
    assert copy(tmp_path / "one", there) == 10
    assert copy(there, tmp_path / "two") == 10
    one, two = (SQLiteQueue(tmp_path / name / "bloom.sqlite") for name in ("one", "two"))
    assert rows(one) == rows(shared.queue()) == rows(two)
    expected = {State.PENDING: 7, State.WAITING: 1, State.FAILED: 1, State.DEAD: 1}
    assert {state: number for state, number in two.status().counts.items() if number} == expected
    worker = shared.open()
    assert enter(worker, page("target")) == [False]  # it waits, because a row of the copy is there
    worker.close()
    for store in (local(tmp_path / "two"), shared.open()):
        store.apply(Batch(may_start=True))
        store.apply(Batch(start_ended=True))
        assert len(emptied(store)) == 9
        store.close()


def test_no_copy_while_workers_live(shared: InRedis, key: str, tmp_path: Path) -> None:
    make_job(tmp_path / "one")
    there = RedisPlace(shared.server, key)
    copy(tmp_path / "one", there)
    worker = shared.open()
    assert take(worker)
    for target in (tmp_path / "two", RedisPlace(shared.server, f"{key}:two")):
        with pytest.raises(
            StorageError, match=r"1 worker \(.*\) uses the queue .* nothing was copied"
        ):
            copy(there, target)
    assert not (tmp_path / "two").exists()
    assert not servers.shared("valkey").client.keys(f"*{key}:two*")
    shared.lapse(worker)
    assert copy(there, tmp_path / "two") == 60
    assert local(tmp_path / "two").pending == 60


def test_no_copy_of_a_queue_that_a_worker_uses_meanwhile(
    shared: InRedis, key: str, tmp_path: Path
) -> None:
    """A request moves to a set that was read already: the copy would lack it."""
    make_job(tmp_path / "one", 250)
    there = RedisPlace(shared.server, key)
    copy(tmp_path / "one", there)
    requests = RedisSource(shared.server, key).requests()
    next(requests)  # those in flight were read before, and a hundred of the pending ones
    worker = shared.open()
    assert all(take(worker) for _ in range(3))  # one of each host
    assert len(list(islice(requests, 200))) == 200
    worker.close()
    with pytest.raises(StorageError, match="a crawl has used .* meanwhile"):
        list(requests)


def test_nothing_is_left_of_a_copy_that_failed(shared: InRedis, key: str, tmp_path: Path) -> None:
    make_job(tmp_path / "one")
    there = RedisPlace(shared.server, key)
    client = servers.shared("valkey").client
    copy(tmp_path / "one", there)
    before = sorted(client.keys(f"*{key}*"))
    with pytest.raises(StorageError, match="has a filter"):
        copy(tmp_path / "one", there)
    assert sorted(client.keys(f"*{key}*")) == before
    assert all(client.ttl(entry) == -1 for entry in before)
    names = keys_of(key)
    assert {*names[:2]} < {entry.decode() for entry in before}
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    files = contents(tmp_path)
    for target in ("one", "file", "link"):
        with pytest.raises(StorageError, match="exists already; nothing was changed"):
            copy(there, tmp_path / target)
    assert contents(tmp_path) == files
    (id_, *_) = client.hkeys(shared.keys["rows"])
    client.hset(shared.keys["rows"], id_, b"zzz of somebody else")
    for target in (tmp_path / "new/two", RedisPlace(shared.server, f"{key}:two")):
        with pytest.raises(StorageError, match="is not a request of CrashSafeScheduler"):
            copy(there, target)
    assert not (tmp_path / "new").exists()
    assert not client.keys(f"*{key}:two*")
