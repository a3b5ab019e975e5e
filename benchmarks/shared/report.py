"""What a benchmark hands back, and how it reads as Markdown."""

import statistics
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """A promise and what was measured, both as text."""

    what: str
    target: str
    measured: str
    met: bool


@dataclass(frozen=True)
class Table:
    """Figures behind the checks."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Plot:
    """Figures that are best seen.

    Attributes:
        name: of the image's file, without its ending.
        title: what is to be seen.
        x: what the horizontal axis shows, and in which unit.
        y: likewise of the vertical one.
        series: the points of each line, by its name; the first is ours.
        log_x: whether the horizontal axis is logarithmic; all x must be positive then.
        log_y: likewise.
    """

    name: str
    title: str
    x: str
    y: str
    series: Mapping[str, Sequence[tuple[float, float]]]
    log_x: bool = True
    log_y: bool = True


@dataclass(frozen=True)
class Section:
    """One benchmark's part of the page.

    Attributes:
        title: what was measured.
        method: how, in a few sentences.
        checks: the promises; empty if the benchmark was skipped.
        tables: the figures in detail.
        notes: what to know before quoting the figures, a line each.
        plots: the figures as pictures.
    """

    title: str
    method: str
    checks: Sequence[Check] = ()
    tables: Sequence[Table] = ()
    notes: str = ""
    plots: Sequence[Plot] = ()


def at_most(what: str, measured: float, limit: float, form: str = "{:.3f}") -> Check:
    """A check that is met up to a limit; `form` writes both numbers."""
    return Check(what, "at most " + form.format(limit), form.format(measured), measured <= limit)


def at_least(what: str, measured: float, limit: float, form: str = "{:.1f}") -> Check:
    """A check that is met from a limit on; `form` writes both numbers."""
    return Check(what, "at least " + form.format(limit), form.format(measured), measured >= limit)


def all_of(what: str, right: int, total: int) -> Check:
    """A check that is met only by all of a number of cases, of which there must be some."""
    return Check(what, "all", f"{right:,} of {total:,}", 0 < right == total)


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """25th percentile, median and 75th percentile; of a single value, three times that."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def section_text(section: Section, *, made: str = "", pictures: str = "") -> str:
    """One benchmark: its promises, then the figures behind them.

    Args:
        section: what it handed back.
        made: when and where, in a sentence.
        pictures: the directory of the images of its plots; without it, they are left out.
    """
    parts = [f"## {section.title}", wrapped(section.method), wrapped(made)]
    if section.checks:
        rows = [check_cells(check) for check in section.checks]
        parts.append(table_text(Table(("promise", "target", "measured", "met"), rows)))
    if pictures:
        parts += [
            f"![{plot.title}: {plot.y}, by {plot.x}, of {', '.join(plot.series)}]"
            f"({pictures}/{plot.name}.png)"
            for plot in section.plots
        ]
    parts += [table_text(table) for table in section.tables]
    parts.append("\n".join(wrapped(note, "- ", "  ") for note in section.notes.splitlines()))
    return "\n\n".join(part for part in parts if part) + "\n"


def check_cells(check: Check) -> Sequence[str]:
    return check.what, check.target, check.measured, "yes" if check.met else "**no**"


def table_text(table: Table) -> str:
    lines = [table.head, ["---"] * len(table.head), *table.rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def wrapped(text: str, first: str = "", rest: str = "") -> str:
    return textwrap.fill(
        text, 100, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False
    )
