"""What tests of several commands use."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from scrapy_bloom.job.jobdir import lock_job
from tests.support import servers
from tests.support.reports import made, make, report


@pytest.fixture
def server() -> servers.Server:
    return servers.shared("valkey")


@pytest.fixture
def place(server: servers.Server, key: str) -> tuple[str, ...]:
    """Return the filter of this test in Redis, as arguments of a command."""
    return (f"{server.url}#{key}",)


@pytest.fixture(scope="module")
def grown_job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A running crawl's job directory, whose filter has grown twice."""
    place = tmp_path_factory.mktemp("grown") / "job"
    made(place, 100_000)
    lock, backend = lock_job(place), make(place)
    yield place
    lock.release()
    assert backend.add(b"later")
    backend.close()


@pytest.fixture(scope="module")
def grown_page(grown_job: Path) -> str:
    return report(grown_job)
