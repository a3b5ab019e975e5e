"""Fixtures of several tests of generations."""

from pathlib import Path

import pytest

from tests.support.clock import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["files", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return tmp_path if request.param == "files" else None
