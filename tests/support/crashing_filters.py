"""Filters in files that end as in a crash."""

from pathlib import Path

from scrapy_bloom.files.backend import LocalBackend
from scrapy_bloom.job.recovery import Job
from tests.support.backends import local_backend

FILTER_NAME = "generation-0001.bloom"


def make(directory: Path | None, **options: object) -> LocalBackend:
    job = Job(options.pop("job_dir", None), options.pop("on_unclean_shutdown", "auto"))
    if job.path is not None:  # the crawl has locked it
        (job.path / "bloom").mkdir(parents=True, exist_ok=True)
    backend = local_backend(
        directory, **{"capacity": 2000, "error_rate": 1e-6, "sync_secs": 0, "job": job, **options}
    )
    backend.open()
    return backend


def abandon(backend: LocalBackend) -> None:
    """End a backend as a crash does: nothing written, the lock gone with the process."""
    backend.unlock()


def add(backend: LocalBackend, *fingerprints: bytes) -> list[bool]:
    backend.begin()
    return [backend.add(fingerprint) for fingerprint in fingerprints]
