"""A fixture of the tests of Redis: a server with a password."""

from collections.abc import Iterator

import pytest

from tests.support import servers
from tests.support.redis_faults import locked_server


@pytest.fixture
def server() -> Iterator[servers.Server]:
    server = locked_server()
    yield server
    server.end()
