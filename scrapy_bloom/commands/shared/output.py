"""Print the results of subcommands: tables for people, JSON for programs.

Figures go to the standard output, everything else to the error output.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

from scrapy_bloom.exceptions import BloomError
from scrapy_bloom.text import escaped, masked

T = TypeVar("T")
# For each column, its name and the text of a row. One whose name ends with ":" has text, aligned to
# the left.
Columns: TypeAlias = Sequence[tuple[str, Callable[[T], str]]]


def print_json(figures: Any, *, indent: int | None = 2) -> None:
    """Print figures for a program; they may contain dataclasses."""
    sys.stdout.write(json.dumps(figures, indent=indent, default=dataclasses.asdict) + "\n")


def print_table(columns: Columns[T], rows: Sequence[T]) -> None:
    """Print rows below the names of their columns."""
    lines = [[name.removesuffix(":") for name, _ in columns]]
    lines += [[escaped(text(row)) for _, text in columns] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = (
            cell.ljust(width) if name.endswith(":") else cell.rjust(width)
            for (name, _), cell, width in zip(columns, line, widths, strict=True)
        )
        say("  ".join(cells).rstrip())


def say(text: str) -> None:
    """Print a line of the result."""
    sys.stdout.write(f"{escaped(text)}\n")


def note(text: str) -> None:
    """Print a line about the result on the error output."""
    sys.stderr.write(f"{escaped(masked(text))}\n")


def confirm(question: str, options: argparse.Namespace) -> None:
    """Ask a question, unless there is --yes; raise a BloomError if nobody agrees."""
    if options.yes:
        return
    if not sys.stdin.isatty():
        raise BloomError(f"{question} Cannot ask without a terminal: add --yes to agree")
    sys.stderr.write(f"{escaped(question)} [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in {"y", "yes"}:
        raise BloomError("nothing was changed")
