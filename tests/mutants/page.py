"""The tables of docs/testing.md: python tests/mutants/page.py writes them from the baseline."""

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BASELINE = Path(__file__).with_name("baseline.json")
PAGE = ROOT / "docs" / "testing.md"
BEGIN, END = "<!-- written by tests/mutants/page.py -->", "<!-- until here -->"


def tables() -> str:
    """Return a row for each module and package, and the survivors with their reasons."""
    baseline = json.loads(BASELINE.read_text("utf-8"))
    rows = ["| module | mutants | run | killed | survived | score |"]
    rows.append("|---|---:|---:|---:|---:|---:|")
    packages: dict[str, list[str]] = {}
    for module in baseline:
        packages.setdefault(module.partition("/")[0], []).append(module)
    for package, modules in packages.items():
        rows += [_row(f"`{module}`", [baseline[module]]) for module in modules]
        if len(modules) > 1:
            rows.append(_row(f"**{package}**", [baseline[module] for module in modules]))
    rows.append(_row("**all**", list(baseline.values())))
    return "\n".join(rows)


def _row(name: str, figures: list[dict]) -> str:
    made = sum(each["made"] for each in figures)
    mutants = sum(each["mutants"] for each in figures)
    survived = sum(len(each["survivors"]) for each in figures)
    killed = mutants - survived
    score = f"{int(1000 * killed / mutants) / 10} %"
    figures_told = (made, mutants, killed, survived, score)
    return f"| {name} | {' | '.join(map(str, figures_told))} |"


def page() -> str:
    """Return the page with the tables of the baseline."""
    pattern = re.compile(f"(?<={re.escape(BEGIN)}\n).*(?={re.escape(END)})", re.DOTALL)
    return pattern.sub(lambda _: f"\n{tables()}\n\n", PAGE.read_text("utf-8"))


def write_page() -> None:
    """Write them into the page."""
    PAGE.write_text(page(), "utf-8")


if __name__ == "__main__":
    if sys.argv[1:] == ["--print"]:
        sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
        sys.stdout.write(page())
    else:
        write_page()
