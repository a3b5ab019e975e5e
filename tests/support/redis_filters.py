"""Filters in the Redis servers of all tests."""

import hashlib
import logging

import pytest

import servers
from backends import redis_backend
from scrapy_bloom.redis.backend import RedisBackend
from scrapy_bloom.redis.connection.server import RedisServer

PLACES = [*servers.PROGRAMS, "cluster"]
WARNING, INFO, ERROR = logging.WARNING, logging.INFO, logging.ERROR


def fps(start: int, stop: int | None = None) -> list[bytes]:
    numbers = range(start) if stop is None else range(start, stop)
    return [hashlib.sha1(b"%d" % number).digest() for number in numbers]


def url_of(place: str) -> str:
    return servers.shared_cluster().url if place == "cluster" else servers.shared(place).url


def make(place: str, key: str, *, url: str = "", **options: object) -> RedisBackend:
    """A backend, not yet opened; at this error rate it does not err in a test.

    A server that is only slow is not away, however short the deadline is.
    """
    server = RedisServer(
        f"{url or url_of(place)}?socket_timeout=10",
        cluster=place == "cluster",
        deadline_secs=options.pop("deadline_secs", 10),
    )
    return redis_backend(server, key, **{"capacity": 2000, "error_rate": 1e-12, **options})


def opened(place: str, key: str, **options: object) -> RedisBackend:
    in_a_run = options.pop("in_a_run", True)  # else what has expired is not kept for the run
    backend = make(place, key, **options)
    backend.open()
    if in_a_run:
        backend.begin()
    return backend


def messages(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno == level and record.name.startswith("scrapy_bloom")
    ]
