"""Fixtures of several tests of files."""

from pathlib import Path

import pytest


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A job directory as Scrapy leaves one, with a queue."""
    (tmp_path / "requests.queue").mkdir()
    (tmp_path / "requests.queue/active.json").write_text("[0]")
    return tmp_path
