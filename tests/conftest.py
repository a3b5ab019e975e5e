"""Fixtures that several test modules share."""

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from scrapy.utils.reactor import install_reactor

from tests.support import crawls, servers, shared_crawls, sites
from tests.support.machine import REAL_SITES, REQUIRED
from tests.support.processes import do_not_ignore, warm_up
from tests.support.request_queues import InRedis

# Machines that run tests are shared and slow at times; a deadline would test them, not us.
settings.register_profile(
    "scrapy_bloom", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("scrapy_bloom")

if "python3-doc" in REQUIRED and not REAL_SITES:
    raise RuntimeError(f"{sites.PYTHON_DOC} is missing: apt-get install python3-doc")
if "strace" in REQUIRED and shutil.which("strace") is None:
    raise RuntimeError("strace is missing: apt-get install strace")
if "redis-server" in REQUIRED and "redis" not in servers.PROGRAMS:
    raise RuntimeError("redis-server is missing: apt-get install redis-server")


def pytest_xdist_auto_num_workers() -> int:
    """Return the number of workers: they wait for others half of their time."""
    return min(8, 2 * (os.cpu_count() or 1))


def pytest_itemcollected(item: pytest.Item) -> None:
    if "disk" in getattr(item, "fixturenames", ()):
        item.add_marker("root")


warm_up()
do_not_ignore(getattr(signal, "SIGHUP", signal.SIGINT), signal.SIGINT)


@pytest.fixture(autouse=True)
def _no_crawl_outlives_its_test() -> Iterator[None]:
    yield
    crawls.end_all()


@pytest.fixture(scope="session")
def reactor() -> None:
    """Install a reactor, which Scrapy 2.14 needs for a crawler."""
    install_reactor("twisted.internet.asyncioreactor.AsyncioSelectorReactor")


@pytest.fixture
def server() -> Iterator[servers.Server]:
    """Start a server for one test alone."""
    with servers.Server() as server:
        yield server


@pytest.fixture
def tree(request: pytest.FixtureRequest) -> Iterator[sites.Site]:
    """Serve a tree of as many pages as the module needs."""
    with sites.tree_site(getattr(request.module, "PAGES", 150)) as site:
        yield site


@pytest.fixture
def wide() -> Iterator[sites.Site]:
    with shared_crawls.wide_site() as site:
        yield site


@pytest.fixture
def key(tmp_path: Path) -> str:
    """Return the key of a filter that no other test has."""
    return os.fspath(tmp_path)


@pytest.fixture
def shared(key: str) -> Iterator[InRedis]:
    """Return a queue on the Valkey server of all tests."""
    queue = InRedis("valkey", key)
    yield queue
    queue.end()


@pytest.fixture
def durable() -> Iterator[servers.Server]:
    """Start a server that syncs each command to the disk."""
    with servers.Server("valkey", "--appendonly", "yes", "--appendfsync", "always") as server:
        yield server
