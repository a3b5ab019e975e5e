"""Fixtures of several tests of generations."""

import pytest

from tests.support.clock import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()
