"""Print the results of subcommands: tables and progress bars for people, JSON for programs.

Figures go to the standard output, everything else to the error output.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from scrapy_bloom.exceptions import BloomError
from scrapy_bloom.text import escaped, masked

if TYPE_CHECKING:
    from rich.console import Console

_WIDEST = 10_000  # characters of a table: rich would cut off digits to make it narrower


def print_json(figures: Any) -> None:
    """Print figures for a program."""
    sys.stdout.write(json.dumps(figures, indent=2) + "\n")


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


Columns = Sequence[tuple[str, str, Callable[[Any], str]]]


def table(columns: Columns, rows: Sequence[Mapping[str, Any]]) -> Any:
    """Return figures in columns, as a rich renderable.

    Args:
        columns: for each, its name, the key of its values ("": the row itself), and the function
            that formats a value. One whose name ends with ":" has text, aligned to the left.
        rows: figures by their keys, as --json prints them; None if a key is missing.
    """
    from rich.table import Table  # noqa: PLC0415 - only if it is used

    found = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name, _, _ in columns:
        is_text = name.endswith(":")
        found.add_column(
            name.removesuffix(":"),
            justify="left" if is_text else "right",
            no_wrap=not is_text,
            overflow="fold",
        )
    for row in rows:
        found.add_row(*(escaped(text(row.get(key) if key else row)) for _, key, text in columns))
    return found


def print_table(columns: Columns, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a `table`, without cutting it off where the terminal is narrower."""
    console_of(sys.stdout, width=_WIDEST, color_system=None).print(table(columns, rows))


def console_of(stream: TextIO, **options: Any) -> "Console":
    """Return a console that is interactive only at a terminal, even if FORCE_COLOR is set."""
    from rich.console import Console  # noqa: PLC0415 - only if it is used

    interactive = None if stream.isatty() else False
    return Console(
        file=stream,
        force_interactive=interactive,
        markup=False,
        emoji=False,
        highlight=False,
        **options,
    )


@contextmanager
def progress(what: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """Show a bar with rate and time left, on the error output if that is a terminal.

    The block gets a function that takes the number of requests done.
    """
    from rich import progress as rich  # noqa: PLC0415 - only if it is used

    console = console_of(sys.stderr)
    columns = (
        rich.TextColumn("{task.description}"),
        rich.TextColumn("{task.completed:,.0f} requests"),
        rich.TextColumn("{task.fields[rate]}"),
        rich.TimeRemainingColumn(),
    )
    shown = console.is_interactive
    with rich.Progress(*columns, console=console, transient=True, disable=not shown) as bar:
        task, begun = bar.add_task(what, total=total, rate=""), time.monotonic()

        def advance(done: int) -> None:
            secs = time.monotonic() - begun
            bar.update(task, completed=done, rate=f"{done / max(secs, 1e-3):,.0f}/s")

        yield advance
