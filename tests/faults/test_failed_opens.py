"""Openings that fail: they leave no descriptor and no mapping in the process."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from scrapy_bloom import StorageError
from scrapy_bloom.files.backend import LocalBackend
from scrapy_bloom.generations.policy import ANY_ORIGIN, Origin, Policy
from scrapy_bloom.job.recovery import Job
from scrapy_bloom.queues.sqlite_store import SQLiteStore
from scrapy_bloom.queues.store import Batch, Entered, Joining
from tests.support.request_queues import killed

DATABASE = "requests.sqlite"
FILTER = "bloom/generation-0001.bloom"

_referenced: list[SQLiteStore] = []  # as a crawler or a traceback refers to it


def resources(job: Path) -> tuple[int, int]:
    """Return how many descriptors this process has, and how many mappings of the filter."""
    mappings = Path("/proc/self/maps").read_text().splitlines()
    descriptors = list(Path("/proc/self/fd").iterdir())
    return len(descriptors), sum(str(job) in each for each in mappings)


def opened(job: Path, spider: str = "shop", origin: Origin = ANY_ORIGIN) -> SQLiteStore:
    backend = LocalBackend(
        job / "bloom", Policy(expected=1000, error_rate=1e-6), origin, job=Job(job)
    )
    store = SQLiteStore(job / DATABASE, backend, by_slot=True)
    _referenced.append(store)
    store.open(Joining(spider))
    return store


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "bloom").mkdir()
    store = opened(tmp_path)
    store.apply(Batch([Entered(b"request", b"fingerprint")]))
    killed(store)
    return tmp_path


def spoil(job: Path, trouble: str) -> None:
    if trouble == "foreign":
        (job / DATABASE).write_bytes(b"no database" * 1000)
    elif trouble == "fingerprints":
        with closing(sqlite3.connect(job / DATABASE, isolation_level=None)) as db:
            assert db.execute("UPDATE ops SET recorded = x'FFFFFFFF'").rowcount
    elif trouble == "header":
        with (job / FILTER).open("r+b") as file:
            file.write(b"no filter")
    elif trouble == "record":
        (job / "bloom/log.json.tmp/in the way").mkdir(parents=True)


@pytest.mark.parametrize(
    "trouble", ["foreign", "fingerprints", "header", "record", "spider", "fingerprinter"]
)
def test_an_opening_that_fails_leaves_nothing_open(trouble: str, job: Path) -> None:
    spoil(job, trouble)
    spider = "other" if trouble == "spider" else "shop"
    origin = Origin(fingerprinter="other") if trouble == "fingerprinter" else ANY_ORIGIN
    before = None
    for _ in range(3):
        with pytest.raises(StorageError):
            opened(job, spider, origin)
        # The first attempt may import modules.
        before = before or resources(job)
        assert resources(job) == before
    assert before
    assert before[1] == 0
