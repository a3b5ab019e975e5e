"""`scrapy bloom` with `python -OO`, which leaves out docstrings and assertions."""

from pathlib import Path

import pytest

from scrapy_bloom.commands import SUBCOMMANDS
from tests.support.cli import bloom

OPTIMIZED = ("env", "PYTHONOPTIMIZE=2")


@pytest.mark.parametrize("name", ["", *SUBCOMMANDS])
def test_the_help(name: str, tmp_path: Path) -> None:
    arguments = [*filter(None, [name.removesuffix("_")]), "--help"]
    ran = bloom(*arguments, cwd=tmp_path, under=OPTIMIZED)
    assert ran.status == 0
    assert "usage" in ran.out.lower()
