"""Backends by the names that settings have, in place of a policy and an origin."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

from scrapy_bloom.generations.memory import MemoryBackend
from scrapy_bloom.generations.policy import Origin, Policy
from scrapy_bloom.job.filter import LocalBackend
from scrapy_bloom.redis.backend import RedisBackend
from scrapy_bloom.redis.server import RedisServer

Backend = TypeVar("Backend", MemoryBackend, LocalBackend, RedisBackend)


def local_backend(job_dir: Path | None, **options: Any) -> Any:
    """Make a filter in a job directory, or in memory if there is none."""
    clock, least_new = options.pop("clock", None), options.pop("least_new", None)
    described = _described(options)
    if job_dir is None:
        backend = MemoryBackend(*described)
    else:
        job_dir.mkdir(parents=True, exist_ok=True)  # which a crawl has locked
        backend = LocalBackend(job_dir, *described, **options)
        backend._least_new = least_new or LocalBackend._least_new
    if clock is not None:
        backend._clock = clock
    return backend


def redis_backend(server: RedisServer, key: str, **options: Any) -> RedisBackend:
    clock, trust_secs = options.pop("clock", None), options.pop("trust_secs", 1.0)
    backend = RedisBackend(server, key, *_described(options), **options)
    backend._trust_secs = trust_secs
    if clock is not None:
        backend.now = clock
    return backend


def begun(backend: Backend, recorded: Iterable[bytes] = ()) -> Backend:
    """Open a backend as a crawl does, and record some fingerprints."""
    backend.open()
    backend.begin()
    for entry in recorded:
        backend.add(entry)
    return backend


def _described(options: dict[str, Any]) -> tuple[Policy, Origin]:
    """Take what describes a filter out of the options."""
    policy = Policy(
        expected=options.pop("capacity"),
        error_rate=options.pop("error_rate"),
        window=options.pop("window_secs", 0.0),
        is_endless=options.pop("is_endless", False),
    )
    names = ("salt", "fingerprinter", "spider")
    return policy, Origin(**{name: options.pop(name) for name in names if name in options})
