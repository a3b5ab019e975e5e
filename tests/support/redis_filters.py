"""Filters in the Redis servers of all tests."""

import logging

import pytest

from scrapy_bloom.redis.backend import RedisBackend
from tests.support import servers
from tests.support.crowds import backend_at, fps

__all__ = ["fps"]

PLACES = [*servers.PROGRAMS, "cluster"]
WARNING, INFO, ERROR = logging.WARNING, logging.INFO, logging.ERROR


def url_of(place: str) -> str:
    return servers.shared_cluster().url if place == "cluster" else servers.shared(place).url


def make(place: str, key: str, *, url: str = "", **options: object) -> RedisBackend:
    """Make a backend at one of PLACES, not opened yet."""
    return backend_at(url or url_of(place), key, cluster=place == "cluster", **options)


def opened(place: str, key: str, **options: object) -> RedisBackend:
    backend = make(place, key, **options)
    backend.open()
    backend.begin()
    return backend


def messages(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno == level and record.name.startswith("scrapy_bloom")
    ]
