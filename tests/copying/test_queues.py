"""Copying a queue with its filter: the same requests in the same order, or nothing at all."""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from scrapy_bloom import LockedError, StorageError
from scrapy_bloom.copying.transfer import download, upload
from scrapy_bloom.job.jobdir import lock_job
from scrapy_bloom.queues.batch import Batch, Found
from scrapy_bloom.queues.job_state import read_dead
from scrapy_bloom.queues.sqlite import RequestDatabase
from scrapy_bloom.redis.scripts import keys_of
from tests.support import servers
from tests.support.backends import local_backend
from tests.support.redis_filters import PLACES
from tests.support.request_queues import InRedis, begun, done, take
from tests.support.workspace import FINGERPRINTER


def make_job(job: Path, number: int = 60) -> None:
    """A closed job, with requests of three hosts, and with all kinds of priorities."""
    backend = local_backend(
        job / "bloom", capacity=2000, error_rate=1e-6, fingerprinter=FINGERPRINTER, spider="shop"
    )
    backend.open()
    backend.begin()
    backend.add(b"page")
    backend.forgotten.add([b"page"])
    backend.close()
    queue = local(job)
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
    queue.close()


def local(job: Path) -> RequestDatabase:
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
    copied = upload(tmp_path / "one/bloom", shared.server, key)
    assert copied[1] == 60
    state = shared.state()
    assert (state.pending, state.done, state.crawl) == (60, 0, "shop")
    assert shared.server.send("HGET", key, "pushed") == b"60"
    assert download(shared.server, key, tmp_path / "two/bloom")[1] == 60
    expected = emptied(local(tmp_path / "one"))
    assert len(expected) == 60
    assert emptied(local(tmp_path / "two")) == expected
    assert emptied(shared.open(by_slot=True)) == expected
    shared.end()


def test_suspects_and_dead_letters_go_along(shared: InRedis, key: str, tmp_path: Path) -> None:
    make_job(tmp_path / "one", 5)
    with closing(sqlite3.connect(tmp_path / "one/requests.sqlite")) as db, db:
        db.execute("UPDATE requests SET state = 2, deaths = 3 WHERE id = 1")
        db.execute("UPDATE requests SET state = 3, deaths = 3 WHERE id = 2")
    assert upload(tmp_path / "one/bloom", shared.server, key)[1] == 5
    state = shared.state()
    assert (state.pending, state.suspects, state.dead) == (3, 1, 1)
    assert download(shared.server, key, tmp_path / "two/bloom")[1] == 5
    assert len(read_dead(tmp_path / "two/requests.sqlite")) == 1
    assert local(tmp_path / "two").suspects == 1
    assert len(emptied(shared.open())) == 4  # the suspect at last


def test_no_pull_while_workers_live(shared: InRedis, key: str, tmp_path: Path) -> None:
    make_job(tmp_path / "one")
    upload(tmp_path / "one/bloom", shared.server, key)
    worker = shared.open()
    assert take(worker)
    with pytest.raises(StorageError, match="workers use the queue"):
        download(shared.server, key, tmp_path / "two/bloom")
    assert not (tmp_path / "two").exists()
    shared.lapse(worker)
    assert download(shared.server, key, tmp_path / "two/bloom")[1] == 60
    assert local(tmp_path / "two").pending == 60


def test_nothing_is_left_of_a_copy_that_failed(shared: InRedis, key: str, tmp_path: Path) -> None:
    make_job(tmp_path / "one")
    lock = lock_job(tmp_path / "one")
    with pytest.raises(LockedError):
        upload(tmp_path / "one/bloom", shared.server, key)
    lock.release()
    client = servers.shared("valkey").client
    assert not client.keys(f"*{key}*")
    upload(tmp_path / "one/bloom", shared.server, key)
    before = sorted(client.keys(f"*{key}*"))
    with pytest.raises(StorageError, match="has a filter"):
        upload(tmp_path / "one/bloom", shared.server, key)
    assert sorted(client.keys(f"*{key}*")) == before
    assert all(client.ttl(each) == -1 for each in before)
    names = keys_of(key)
    assert {*names[:2], names[-1]} < {each.decode() for each in before}
    with pytest.raises(StorageError, match="holds a filter already"):
        download(shared.server, key, tmp_path / "one/bloom")
    (tmp_path / "one/bloom/generation-0001.bloom").unlink()
    with pytest.raises(StorageError, match="holds a queue already"):
        download(shared.server, key, tmp_path / "one/bloom")
    client.zadd(shared.keys["pending"], {b"zzz of somebody else": 0})
    with pytest.raises(StorageError, match="is no request of CrashSafeScheduler"):
        download(shared.server, key, tmp_path / "two/bloom")
    assert not (tmp_path / "two").exists()
