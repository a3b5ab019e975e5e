"""What tests of several commands use."""

import pytest

from tests.support import servers


@pytest.fixture
def server() -> servers.Server:
    return servers.shared("valkey")
