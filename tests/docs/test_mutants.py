"""The table of docs/testing.md is what the program makes of the saved baseline."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
MUTANTS = ROOT / "tests" / "mutants"


def test_the_table_is_that_of_the_baseline() -> None:
    command = [sys.executable, str(MUTANTS / "page.py"), "--print"]
    made = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=60, check=True)
    assert made.stdout == (ROOT / "docs" / "testing.md").read_text("utf-8")


def test_nine_of_ten_mutants_are_killed_and_the_others_have_been_looked_at() -> None:
    baseline = json.loads((MUTANTS / "baseline.json").read_text("utf-8"))
    survivors = [each for figures in baseline.values() for each in figures["survivors"]]
    assert len(survivors) <= 0.1 * sum(figures["mutants"] for figures in baseline.values())
    assert all(each["reason"] for each in survivors)
