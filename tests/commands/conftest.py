"""What tests of several commands use."""

import pytest

import servers


@pytest.fixture
def server() -> servers.Server:
    return servers.shared("valkey")
