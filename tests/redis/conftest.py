"""Fixtures of several tests of Redis."""

import os
from pathlib import Path

import pytest


@pytest.fixture
def key(tmp_path: Path) -> str:
    return os.fspath(tmp_path)
