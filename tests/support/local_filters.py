"""Small filters in files and in memory, with a clock of our own."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from scrapy_bloom.files.backend import LocalBackend
from scrapy_bloom.job.recovery import Job
from tests.support.backends import local_backend
from tests.support.clock import Clock

WINDOW = 1000.0
FILTER_NAME = "generation-0001.bloom"
SALT = bytes(range(16))


def make(place: Path | None, clock: Clock | None = None, **options: Any) -> LocalBackend:
    """Open a small filter, perhaps of the job in `job_dir`."""
    if job := options.pop("job_dir", None):  # the crawl has locked it
        (job / "bloom").mkdir(parents=True, exist_ok=True)
    options.setdefault("job", Job(job))
    backend = local_backend(
        place,
        **{
            "capacity": 100,
            "error_rate": 1e-9,
            "salt": SALT,
            "clock": clock or Clock(),
            **options,
        },
    )
    backend.open()
    return backend


def abandon(backend: LocalBackend) -> None:
    """End a backend as a crash does: nothing written, the lock gone with the process."""
    backend._lock.close()


def left_by_a_kill(place: Path, *fingerprints: bytes, **options: Any) -> None:
    """Leave a filter as a killed crawl does."""
    backend = make(place, **options)
    add(backend, *fingerprints or [b"page"])
    abandon(backend)


def add(backend: LocalBackend, *fingerprints: bytes) -> list[bool]:
    backend.begin()
    return [backend.add(fingerprint) for fingerprint in fingerprints]


def fps(*numbers: int) -> list[bytes]:
    return [number.to_bytes(20, "big") for number in range(*numbers)]


def files(place: Path) -> list[str]:
    return sorted(path.name for path in place.iterdir() if path.name != "lock")


@contextmanager
def file_size_limit(nbytes: int) -> Iterator[None]:
    """Let no file grow beyond a size, as on a full disk."""
    resource = pytest.importorskip("resource", reason="Windows has no such limit")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
