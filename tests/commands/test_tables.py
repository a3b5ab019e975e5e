"""What the commands print in terminals of any width: whole figures, in lines that fit."""

import re
from pathlib import Path

import pytest

from tests.support.cli import at_a_terminal, bloom
from tests.support.workspace import fingerprints, make_filter, urls

COMMANDS = {
    "plan": ("plan", "1M", "200M", "10G", "1e-4", "1e-9"),
    "plan --vs": ("plan", "200M", "1e-6", "--vs"),
    "info": ("info", "filter", "--scan"),
}
ESCAPES = re.compile(r"\x1b\[[?\d;]*[A-Za-z]")


def lines(text: str) -> list[str]:
    """What stays on the screen: without what a progress bar has taken back."""
    shown = [line.rpartition("\r")[2] for line in text.replace("\r\n", "\n").splitlines()]
    return [ESCAPES.sub("", line).rstrip() for line in shown]


def words(table: list[str]) -> set[str]:
    """The figures and names of tables, which are two spaces apart."""
    return {each for line in table for each in re.split(r" {2,}", line.strip())}


@pytest.mark.parametrize("kind", ["xterm", "dumb"])
@pytest.mark.parametrize("name", COMMANDS)
def test_no_figure_is_cut_off(name: str, kind: str, tmp_path: Path) -> None:
    make_filter(tmp_path / "filter", fingerprints(urls(range(900))), capacity=100)
    arguments = COMMANDS[name]
    piped = bloom(*arguments, cwd=tmp_path)
    assert "\x1b" not in piped.out
    first = [line for line in piped.out.splitlines() if line and not line.startswith("  ")]
    tables = [line for line in first if not line.startswith(("Better", "Filter", "Instead", "New"))]
    for columns in (40, 60, 80, 120) if kind == "xterm" else (80,):
        ran = at_a_terminal(*arguments, cwd=tmp_path, columns=columns, kind=kind)
        assert ran.status == 0, ran.out
        shown = lines(ran.out)
        assert words(tables) <= words(shown), columns
        assert "…" not in ran.out
        too_long = [line for line in shown if len(line) > columns and not line.startswith("  ")]
        assert not too_long, columns


def test_a_plan_says_what_loses_no_page(tmp_path: Path) -> None:
    ran = bloom("plan", "10M", "1e-6", "1e-9", cwd=tmp_path)
    assert ran.out.endswith(
        "\nBetter for 10,000,000 requests: 1e-09, which loses 0.0002 pages, in 53.5 MiB\n"
    )
    plans = bloom("plan", "1M", "10M", "100G", "1e-6", "--json", cwd=tmp_path).json
    assert [plan["expected_false_drops"] > 0.1 for plan in plans] == [False, True, True]
    assert plans[0]["advice"] is None
    assert plans[1]["advice"]["error_rate"] == 1e-9
    assert plans[2]["advice"]["error_rate"] == 1e-11
    for plan in plans[1:]:
        assert plan["advice"]["expected_false_drops"] < 0.1
        assert plan["advice"]["bytes"] > plan["bytes"]
    assert "Better" not in bloom("plan", "1M", "1G", cwd=tmp_path).out
