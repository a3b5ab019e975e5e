"""`scrapy bloom` with `python -OO`, which leaves out docstrings and assertions."""

from pathlib import Path

import pytest

from scrapy_bloom.commands import SUBCOMMANDS
from tests.support.cli import bloom
from tests.support.workspace import prepare

OPTIMIZED = ("env", "PYTHONOPTIMIZE=2")


@pytest.mark.parametrize("name", ["", *SUBCOMMANDS])
def test_the_help_is_the_same(name: str, tmp_path: Path) -> None:
    arguments = [*filter(None, [name.removesuffix("_")]), "--help"]
    plain = bloom(*arguments, cwd=tmp_path)
    assert bloom(*arguments, cwd=tmp_path, under=OPTIMIZED) == plain
    assert plain.status == 0


def test_each_command_runs(tmp_path: Path) -> None:
    url = prepare(tmp_path)
    place = f"{url}#shop:bloom"
    ran = set()
    for command in (
        ("plan", "1M", "--vs"),
        ("info", "jobs/shop", "--scan"),
        ("info", place),
        ("queue", place),
        ("queue", "jobs/news"),
        ("add", place, "https://shop.example/new"),
        ("add", "jobs/news", "https://shop.example/new"),
        ("stop", "jobs/shop"),
        ("import", "urls.txt", "filters/new"),
        ("import", "urls.txt", place),
        ("check", place, "urls.txt"),
        ("copy", place, "jobs/copy"),
        ("copy", "filters/a", f"{url}#both"),
        ("report", "jobs/copy", "-o", "report.html"),
        ("reset", place, "--yes"),
        ("reset", "jobs/copy", "--yes"),
    ):
        ended = bloom(*command, cwd=tmp_path, under=OPTIMIZED)
        assert (ended.status, "Traceback" in ended.err) == (0, False), (command, ended)
        ran.add(command[0])
    assert ran == {name.removesuffix("_") for name in SUBCOMMANDS}
    wrong = bloom("info", "nowhere", cwd=tmp_path, under=OPTIMIZED)
    assert "nowhere does not exist" in wrong.error
