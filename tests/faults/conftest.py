"""Fixtures of several tests of faults: a server with a password, and a site that holds back."""

from collections.abc import Iterator

import pytest

from tests.support import servers
from tests.support.redis_faults import (
    GatedSite,
    gated_tree,
    locked_server,
)


@pytest.fixture
def site() -> Iterator[GatedSite]:
    site = gated_tree()
    yield site
    site.end()


@pytest.fixture
def server() -> Iterator[servers.Server]:
    server = locked_server()
    yield server
    server.end()
