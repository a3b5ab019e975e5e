"""Small filters in job directories and in memory, with a clock of our own."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from scrapy_bloom.job.filter import LocalBackend
from tests.support.backends import local_backend
from tests.support.clock import Clock

WINDOW = 1000.0
SALT = bytes(range(16))


def make(job_dir: Path | None, clock: Clock | None = None, **options: Any) -> LocalBackend:
    """Open a small filter in a job directory, or in memory."""
    defaults = {"capacity": 100, "error_rate": 1e-9, "salt": SALT, "clock": clock or Clock()}
    backend = local_backend(job_dir, **{**defaults, **options})
    backend.open()
    return backend


def fps(*numbers: int) -> list[bytes]:
    return [number.to_bytes(20, "big") for number in range(*numbers)]


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
