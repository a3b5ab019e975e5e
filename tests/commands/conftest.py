"""What tests of several commands use."""

from collections.abc import Iterator

import pytest

from tests.support import servers
from tests.support.shared_crawls import wide_site
from tests.support.sites import Site


@pytest.fixture
def server() -> servers.Server:
    return servers.shared("valkey")


@pytest.fixture
def place(server: servers.Server, key: str) -> tuple[str, ...]:
    """Return the filter of this test in Redis, as arguments of a command."""
    return (server.url, "--key", key)


@pytest.fixture
def wide() -> Iterator[Site]:
    site = wide_site()
    yield site
    site.end()
