"""What was measured last, kept as JSON, and the pages that are made of it.

A complete run takes an hour. So each benchmark's result is a file of its own, which a run of that
benchmark alone renews; the pages are always made of all of them.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.shared import plots
from benchmarks.shared.report import (
    Check,
    Plot,
    Section,
    Table,
    section_text,
    table_text,
    wrapped,
)

ABOUT = (
    "`python -m benchmarks` writes this page, and `python -m benchmarks NAME` repeats one of its "
    "benchmarks. {}"
)
DIRECTORY = Path(__file__).resolve().parent.parent / "results"


@dataclass(frozen=True)
class Result:
    """What one benchmark handed back, and what is to be known of the run.

    Attributes:
        name: the benchmark's, on the command line.
        date: when it was run, in UTC.
        command: that ran it.
        quick: whether with small sizes, only to see that it runs.
        facts: the machine and the versions.
        section: its part of the page.
    """

    name: str
    date: str
    command: str
    quick: bool
    facts: Mapping[str, str]
    section: Section


def save(result: Result, directory: Path = DIRECTORY) -> None:
    """Keep a result, in place of an earlier one of the same benchmark."""
    directory.mkdir(exist_ok=True)
    text = json.dumps(asdict(result), indent=1, ensure_ascii=False, allow_nan=False)
    (directory / f"{result.name}.json").write_text(text + "\n", encoding="utf-8")


def load(names: Iterable[str], directory: Path = DIRECTORY) -> list[Result]:
    """The results that are kept of these benchmarks, in their order."""
    paths = [directory / f"{name}.json" for name in names]
    return [_result(json.loads(path.read_text("utf-8"))) for path in paths if path.exists()]


def write_page(
    page: Path,
    shown: Sequence[Result],
    *,
    title: str,
    about: str,
    summary: Sequence[str] = (),
) -> None:
    """Write a page, and its images into the directory of the same name beside it.

    Args:
        page: the path of the page.
        shown: the results on it, at least one.
        title: of the page.
        about: the other pages, in a sentence.
        summary: the parts of its first screen.
    """
    pictures = page.with_suffix("")
    images = {plot.name: plot for result in shown for plot in result.section.plots}
    for old in pictures.glob("*.png"):
        if old.stem not in images:
            old.unlink()
    for plot in images.values():
        pictures.mkdir(parents=True, exist_ok=True)
        plots.draw(plot, pictures / f"{plot.name}.png")
    start = [f"# {title}", *summary, wrapped(ABOUT.format(about))]
    page.write_text(_page_text(start, shown, pictures.name), encoding="utf-8")


def _page_text(start: Sequence[str], shown: Sequence[Result], pictures: str) -> str:
    """The whole page: what is common to all results, then one after the other."""
    first = shown[0].facts
    common = {
        fact: text
        for fact, text in first.items()
        if all(result.facts.get(fact) == text for result in shown)
    }
    parts = [
        *start,
        wrapped(
            "Absolute times depend on the machine and on what else runs on it. So each promise "
            "about time is a ratio of two things measured in the same run, in turn, and the "
            "figure quoted is the median."
        ),
    ]
    if common:
        parts.append(table_text(Table(("", ""), list(common.items()))))
    for result in shown:
        made = f"Measured on {result.date} by `{result.command}`"
        other = [f"{fact} {text}" for fact, text in result.facts.items() if fact not in common]
        made += f", with {'; '.join(other)}." if other else "."
        parts.append(section_text(result.section, made=made, pictures=pictures).rstrip())
    return "\n\n".join(parts) + "\n"


def _result(kept: dict[str, Any]) -> Result:
    section = dict(kept["section"])
    for name, kind in {"checks": Check, "tables": Table, "plots": Plot}.items():
        section[name] = [kind(**entry) for entry in section[name]]
    return Result(**{**kept, "section": Section(**section)})
