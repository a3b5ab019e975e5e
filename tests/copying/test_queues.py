"""Copying a queue with its filter: the same requests in the same order, or nothing at all."""

import os
from pathlib import Path

import pytest

import servers
from backends import local_backend
from request_queues import begun, killed, names, push, take
from scrapy_bloom import LockedError, StorageError
from scrapy_bloom.copying.queues import download_with_queue, upload_with_queue
from scrapy_bloom.crawl.scheduler.shared_queue import SharedStore
from scrapy_bloom.job.locks import lock_job
from scrapy_bloom.queues.batch import Batch, Found, RequestStore
from scrapy_bloom.queues.redis import SharedRequests
from scrapy_bloom.queues.shared_state import read_state
from scrapy_bloom.queues.sqlite import RequestDatabase, read_dead
from scrapy_bloom.redis.connection.server import RedisServer
from workspace import contents

PLACES = [*servers.PROGRAMS, "cluster"]


def server_of(place: str) -> RedisServer:
    if place == "cluster":
        return RedisServer(servers.shared_cluster().url, cluster=True)
    return RedisServer(servers.shared(place).url)


@pytest.fixture
def key(tmp_path: Path) -> str:
    return os.fspath(tmp_path)


def make_job(job: Path) -> None:
    backend = local_backend(job / "bloom", capacity=2000, error_rate=1e-6)
    backend.open()
    backend.begin()
    backend.add(b"page")
    backend.close()


def fill(queue: RequestStore, number: int = 60) -> None:
    """Requests of three hosts, with all kinds of priorities; those of one rank oldest first."""
    for each in range(number):
        rank = (0, 1, -1)[each % 7 % 3]
        found = Found(
            b"request %d" % each + b"\xff\x00" * (each % 3),
            slot=f"host{each % 3}.example",
            priority=(0, 5, -(2**63), 2**63, -7)[each % 5],
            rank=rank,
            newest_first=rank != 1,
        )
        queue.apply(Batch([found]))


def emptied(queue: RequestStore) -> list[bytes]:
    found = []
    while taken := queue.take(Batch(), lambda _: 0):
        found.append(taken.data)
        queue.apply(Batch(done=[taken.id]))
    queue.close()
    return found


def shared(place: str, key: str) -> SharedStore:
    requests = SharedRequests(
        server_of(place), server_of(place), key, by_slot=True, lease_secs=60, most_in_flight=0
    )
    return SharedStore(requests)


def local(job: Path) -> RequestDatabase:
    return begun(job / "requests.sqlite", by_slot=True)


@pytest.fixture
def expected(tmp_path: Path) -> list[bytes]:
    """The order in which a queue of these requests hands them out."""
    (tmp_path / "expected").mkdir()
    queue = local(tmp_path / "expected")
    fill(queue)
    return emptied(queue)


@pytest.mark.parametrize("place", PLACES)
def test_up_and_down_again_in_order(
    place: str, key: str, expected: list[bytes], tmp_path: Path
) -> None:
    make_job(tmp_path / "one")
    queue = local(tmp_path / "one")
    fill(queue)
    queue.close()
    _, copied = upload_with_queue(tmp_path / "one/bloom", server_of(place), key)
    assert copied
    assert copied.requests == len(expected) == 60
    _, back = download_with_queue(server_of(place), key, tmp_path / "two/bloom")
    assert back == copied
    assert emptied(local(tmp_path / "two")) == expected
    again = shared(place, key)
    assert emptied(again) == expected
    assert not local(tmp_path / "one").were_in_flight


def test_what_is_pushed_later_has_its_place(key: str, tmp_path: Path) -> None:
    make_job(tmp_path / "one")
    more: list[list[bytes]] = []
    (tmp_path / "alone").mkdir()
    for copy in (False, True):
        queue: RequestStore = local(tmp_path / ("one" if copy else "alone"))
        fill(queue, 20)
        if copy:
            queue.close()
            upload_with_queue(tmp_path / "one/bloom", server_of("valkey"), key)
            queue = shared("valkey", key)
        fill(queue, 20)
        more.append(emptied(queue))
    assert more[0] == more[1]


def test_what_workers_have_taken_goes_along(key: str, tmp_path: Path) -> None:
    queue = shared("valkey", key)
    fill(queue, 40)
    make_job(tmp_path / "filter")
    assert take(queue)
    state = read_state(server_of("valkey"), key)
    assert state
    assert state.in_flight > 0
    with pytest.raises(StorageError, match="has no filter"):
        download_with_queue(server_of("valkey"), key, tmp_path / "job/bloom")
    assert not (tmp_path / "job/requests.sqlite").exists()
    upload_filter(tmp_path / "filter/bloom", key)
    _, copied = download_with_queue(server_of("valkey"), key, tmp_path / "job/bloom")
    assert copied.requests == 40
    assert local(tmp_path / "job").pending == 40
    queue.close()


def test_a_slot_of_any_name_and_what_was_set_aside(key: str, tmp_path: Path) -> None:
    queue = shared("valkey", key)
    for number in range(3):
        slot = f"\ud800-{number}"
        queue.apply(Batch([Found(b"request", slot=slot, newest_first=False)]))
    taken = take(queue)
    assert taken
    queue.set_aside(taken.id)
    queue.close()
    state = read_state(server_of("valkey"), key)
    assert state
    assert (state.pending, state.in_flight, state.set_aside, state.waiting) == (2, 0, 1, 3)
    upload_filter_of_another(tmp_path / "filter", key)
    _, copied = download_with_queue(server_of("valkey"), key, tmp_path / "job/bloom")
    assert copied.requests == 3
    assert emptied(local(tmp_path / "job")) == [b"request"] * 3


def upload_filter(directory: Path, key: str) -> None:
    _, queue = upload_with_queue(directory, server_of("valkey"), key)
    assert queue is None


def test_a_dead_letter_stays_behind(key: str, tmp_path: Path) -> None:
    """In the copy it would be pending, and end one worker after the other."""
    make_job(tmp_path / "one")
    path = tmp_path / "one/requests.sqlite"
    database = begun(path)
    for name in ("innocent", "dead"):
        push(database, name)
    database.close()
    for _ in range(3):
        database = begun(path)
        assert names(database, 1) == ["dead"]
        killed(database)
    database = begun(path)
    assert database.take_suspect()
    killed(database)
    database = begun(path)
    assert len(database.died) == 1
    database.close()
    _, copied = upload_with_queue(tmp_path / "one/bloom", server_of("valkey"), key)
    assert copied
    assert copied.requests == 1
    assert names(shared("valkey", key), 2) == ["innocent"]
    assert len(read_dead(path)) == 1


def test_many_large_requests(key: str, tmp_path: Path) -> None:
    make_job(tmp_path / "one")
    queue = local(tmp_path / "one")
    for number in range(500):
        queue.apply(Batch([Found(b"%d" % number + bytes(10_000), newest_first=False)]))
    queue.close()
    _, copied = upload_with_queue(tmp_path / "one/bloom", server_of("valkey"), key)
    assert copied
    assert (copied.requests, copied.nbytes > 5_000_000) == (500, True)
    assert download_with_queue(server_of("valkey"), key, tmp_path / "two/bloom")[1] == copied


def test_nothing_is_left_of_a_copy_that_failed(key: str, tmp_path: Path) -> None:
    client = servers.shared("valkey").client
    make_job(tmp_path / "one")
    queue = local(tmp_path / "one")
    fill(queue)
    queue.close()
    before = contents(tmp_path / "one")
    upload_filter_of_another(tmp_path / "other", key)
    with pytest.raises(StorageError, match="has a filter"):
        upload_with_queue(tmp_path / "one/bloom", server_of("valkey"), key)
    assert not client.exists(*(f"{{{key}}}:queue:{name}" for name in ("pending", "state")))
    lock = lock_job(tmp_path / "one")
    with pytest.raises(LockedError):
        upload_with_queue(tmp_path / "one/bloom", server_of("valkey"), f"{key}:2")
    lock.release()
    assert not client.exists(f"{key}:2")
    after = contents(tmp_path / "one")
    assert {name: each for name, each in after.items() if "lock" not in name} == {
        name: each for name, each in before.items() if "lock" not in name
    }


def test_nothing_is_left_in_a_job_of_a_copy_that_failed(key: str, tmp_path: Path) -> None:
    client, pending = servers.shared("valkey").client, f"{{{key}}}:queue:pending"
    make_job(tmp_path / "one")
    queue = local(tmp_path / "one")
    fill(queue)
    queue.close()
    upload_with_queue(tmp_path / "one/bloom", server_of("valkey"), key)
    client.zadd(pending, {b"zzz of somebody else": 0})
    for told in ("is no request of CrashSafeScheduler", "lost"):
        with pytest.raises(StorageError, match=told):
            download_with_queue(server_of("valkey"), key, tmp_path / "two/bloom")
        assert not (tmp_path / "two").exists()
        client.zrem(pending, b"zzz of somebody else")
        client.delete(*client.keys(f"{key}:*:0"), "none")


def upload_filter_of_another(job: Path, key: str) -> None:
    make_job(job)
    upload_filter(job / "bloom", key)


def test_no_queue_of_a_job_is_overwritten(key: str, tmp_path: Path) -> None:
    make_job(tmp_path / "one")
    queue = local(tmp_path / "one")
    fill(queue)
    queue.close()
    upload_with_queue(tmp_path / "one/bloom", server_of("valkey"), key)
    with pytest.raises(StorageError, match="holds a queue already"):
        download_with_queue(server_of("valkey"), key, tmp_path / "one/bloom")
    make_job(tmp_path / "two")
    with pytest.raises(StorageError, match="holds a filter already"):
        download_with_queue(server_of("valkey"), key, tmp_path / "two/bloom")
    assert not (tmp_path / "two/requests.sqlite").exists()
    assert (tmp_path / "two/bloom/generation-0001.bloom").exists()
    assert local(tmp_path / "one").pending == 60
