"""What the commands print in terminals of any width: whole figures."""

from pathlib import Path

import pytest

from tests.support.cli import at_a_terminal, bloom
from tests.support.workspace import fingerprints, make_filter, urls

COMMANDS = {
    "plan": ("plan", "1M", "200M", "10G", "1e-4", "1e-9"),
    "plan --vs": ("plan", "200M", "1e-6", "--vs"),
    "info": ("info", "filter", "--scan"),
}


@pytest.mark.parametrize("columns", [40, 120])
@pytest.mark.parametrize("name", COMMANDS)
def test_no_figure_is_cut_off(name: str, columns: int, tmp_path: Path) -> None:
    make_filter(tmp_path / "filter", fingerprints(urls(range(900))), capacity=100)
    piped = bloom(*COMMANDS[name], cwd=tmp_path)
    assert "\x1b" not in piped.out
    ran = at_a_terminal(*COMMANDS[name], cwd=tmp_path, columns=columns)
    assert ran.status == 0, ran.out
    assert ran.out.replace("\r\n", "\n").endswith(piped.out)


def test_a_plan_says_what_loses_no_page(tmp_path: Path) -> None:
    ran = bloom("plan", "10M", "1e-6", "1e-9", cwd=tmp_path)
    assert ran.out.endswith(
        "\nBetter for 10,000,000 requests: 1e-09, which loses 0.0002 pages, in 53.5 MiB\n"
    )
    plans = bloom("plan", "1M", "10M", "100G", "1e-6", "--json", cwd=tmp_path).json
    assert [plan["expected_false_positives"] > 0.1 for plan in plans] == [False, True, True]
    assert plans[0]["advice"] is None
    assert plans[1]["advice"]["error_rate"] == 1e-9
    assert plans[2]["advice"]["error_rate"] == 1e-11
    for plan in plans[1:]:
        assert plan["advice"]["expected_false_positives"] < 0.1
        assert plan["advice"]["bytes"] > plan["bytes"]
    assert "Better" not in bloom("plan", "1M", "1G", cwd=tmp_path).out
