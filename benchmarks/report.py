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
class Section:
    """One benchmark's part of the page.

    Attributes:
        title: what was measured.
        method: how, in a few sentences.
        checks: the promises; empty if the benchmark was skipped.
        tables: the figures in detail.
        notes: what to know before quoting the figures, a line each.
    """

    title: str
    method: str
    checks: Sequence[Check] = ()
    tables: Sequence[Table] = ()
    notes: str = ""


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


def page_text(
    sections: Sequence[Section], facts: Mapping[str, str], command: str, *, quick: bool
) -> str:
    """The whole page."""
    parts = ["# Benchmarks", _wrapped(f"Written by `{command}`, not by hand.")]
    if quick:
        parts.append("**A smoke test with small sizes: not for quoting.**")
    parts += [
        _wrapped(
            "Absolute times depend on the machine and on what else runs on it. So each promise "
            "about time is a ratio of two things measured in the same run, in turn, and the "
            "figure quoted is the median."
        ),
        table_text(Table(("", ""), list(facts.items()))),
    ]
    parts += [section_text(section) for section in sections]
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


def section_text(section: Section) -> str:
    """One benchmark: its promises, then the figures behind them."""
    parts = [f"## {section.title}", _wrapped(section.method)]
    if section.checks:
        rows = [
            (c.what, c.target, c.measured, "yes" if c.met else "**no**") for c in section.checks
        ]
        parts.append(table_text(Table(("promise", "target", "measured", "met"), rows)))
    parts += [table_text(table) for table in section.tables]
    if section.notes:
        parts.append("\n".join(_wrapped(note, "- ", "  ") for note in section.notes.splitlines()))
    return "\n\n".join(parts) + "\n"


def table_text(table: Table) -> str:
    lines = [table.head, ["---"] * len(table.head), *table.rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _wrapped(text: str, first: str = "", rest: str = "") -> str:
    return textwrap.fill(
        text, 100, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False
    )
