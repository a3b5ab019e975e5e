"""Filters in the Redis servers of all tests."""

import hashlib
import logging
import random
from typing import Any

import pytest

from scrapy_bloom.redis.backend import RedisBackend
from scrapy_bloom.redis.server import RedisServer
from tests.support import servers
from tests.support.backends import begun, redis_backend

PLACES = [*servers.PROGRAMS, "cluster"]
WARNING, INFO, ERROR = logging.WARNING, logging.INFO, logging.ERROR


LIMIT = 60.0  # seconds


def fps(start: int, stop: int | None = None) -> list[bytes]:
    numbers = range(start) if stop is None else range(start, stop)
    return [hashlib.sha1(b"%d" % number).digest() for number in numbers]


def backend_at(url: str, key: str, **options: Any) -> RedisBackend:
    """Make a backend, not opened yet, whose error rate allows no false positive in a test.

    A server that is only slow is not away, however short the deadline is.
    """
    server = RedisServer(
        f"{url}?socket_timeout=10",
        deadline_secs=options.pop("deadline_secs", 10),
    )
    return redis_backend(server, key, **{"capacity": 2000, "error_rate": 1e-12, **options})


def url_of(place: str) -> str:
    return servers.shared_cluster().url if place == "cluster" else servers.shared(place).url


def make(place: str, key: str, *, url: str = "", **options: object) -> RedisBackend:
    """Make a backend at one of PLACES, not opened yet."""
    return backend_at(url or url_of(place), key, **options)


def opened(place: str, key: str, **options: object) -> RedisBackend:
    return begun(make(place, key, **options))


def messages(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno == level and record.name.startswith("scrapy_bloom")
    ]


# Crawlers in processes of their own, which record the same in one filter at the same moment.


def record_at_once(barrier, results, record, count, where, options) -> None:
    backend = backend_at(*where, **options)
    barrier.wait(LIMIT)
    begun(backend)
    results.put(record(backend, fps(count)))
    backend.close()


def one_by_one(backend: RedisBackend, fingerprints: list[bytes]) -> list[int]:
    """Add one after the other; return the numbers of those that were new."""
    return [n for n, fingerprint in enumerate(fingerprints) if backend.add(fingerprint)]


def in_batches(backend: RedisBackend, fingerprints: list[bytes]) -> int:
    """Add in random order, some alone and some in batches; return how many were new."""
    random.Random().shuffle(fingerprints)
    new = 0
    for start in range(0, len(fingerprints), 300):
        batch = fingerprints[start : start + 300]
        new += sum(map(backend.add, batch[:100]))
        new += backend.add_many(batch[100:])
    return new
