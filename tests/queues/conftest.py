"""Fixtures of several tests of queues."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.request_queues import InRedis


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[InRedis]:
    """A queue on the Valkey server of all tests."""
    store = InRedis("valkey", str(tmp_path))
    yield store
    store.end()
