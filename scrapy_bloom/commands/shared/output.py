"""The output of the subcommands: tables and progress bars for people, JSON for programs.

Figures go to the standard output, all else to the error output. A table is plain text: columns at
fixed places, nothing cut off, no colour.
"""

import json
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, TextIO

from scrapy_bloom.exceptions import BloomError
from scrapy_bloom.text import escaped, masked

_ADVANCE_SECS = 0.1  # a bar moves no more often than that: it costs more than a fingerprint


def check_output(path: Path, *, overwrite: bool) -> None:
    """Check that a file may be written, before the work for it is done."""
    if path.is_dir() or not path.parent.is_dir():
        raise BloomError(f"{path} can't be written: give a file in a directory that exists")
    if path.exists() and not overwrite:
        raise BloomError(f"{path} exists already; add --overwrite to replace it")


def print_json(figures: Any) -> None:
    """Print figures for a program."""
    sys.stdout.write(json.dumps(figures, indent=2) + "\n")


def say(text: str) -> None:
    """Print a line of the result; at a terminal, it is broken between words."""
    text = escaped(text)
    if len(text) > (room := _room()):
        hanging = "  " if text.startswith(" ") else ""
        text = textwrap.fill(
            text, room, subsequent_indent=hanging, break_long_words=False, break_on_hyphens=False
        )
    sys.stdout.write(f"{text}\n")


def note(text: str) -> None:
    """Print a line about the result, beside it."""
    sys.stderr.write(f"{escaped(masked(text))}\n")


def _room() -> int:
    """Return how many characters a line may have: those of the terminal, where there is one."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize


def print_table(
    columns: Sequence[tuple[str, str, Callable[[Any], str]]],
    rows: Sequence[Mapping[str, Any]],
    title: str = "",
    *,
    keys: int = 1,
) -> None:
    """Print figures in columns, as wide as the terminal at most.

    Where the columns do not all fit, they come in several tables, one below the other. Nothing is
    ever cut off, or broken within a word. Where there is no terminal, a row is one line.

    Args:
        columns: the name, the key of its figures, and what makes a text of one. A name that ends
            with ":" is that of words, to the left, any other that of figures.
        rows: figures by their keys, as --json prints them.
        title: what they are about.
        keys: that many of the first columns begin each table: they say what a row is about.
    """
    room = _room()
    for line in title.splitlines():
        say(line)
    aligned = [_aligned(name, [text(row[key]) for row in rows]) for name, key, text in columns]
    left = aligned[keys:]
    while True:
        shown = aligned[:keys]
        while left and (
            len(shown) == keys or sum(len(each[0]) + 2 for each in [*shown, left[0]]) - 2 <= room
        ):
            shown.append(left.pop(0))
        for cells in zip(*shown, strict=True):
            sys.stdout.write("  ".join(cells).rstrip() + "\n")
        if not left:
            break
        say("")


def _aligned(name: str, cells: list[str]) -> list[str]:
    align = str.ljust if name.endswith(":") else str.rjust
    texts = [name.removesuffix(":"), *map(escaped, cells)]
    width = max(map(len, texts))
    return [align(text, width) for text in texts]


def _is_lively(stream: TextIO) -> bool:
    """Return whether a line on it can be written again and again."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def working(what: str) -> AbstractContextManager[Any]:
    """Show that something of unknown length goes on, on the error output if it is a terminal."""
    if not _is_lively(sys.stderr):
        return nullcontext()
    from rich.console import Console  # noqa: PLC0415 - only for people

    return Console(stderr=True).status(what)


@contextmanager
def progress(
    what: str,
    total: int | Callable[[], int | None] | None,
    unit: str = "lines",
    *,
    shown: bool = True,
) -> Iterator[Callable[[int], None]]:
    """Show a bar with rate and time left, on the error output if that is a terminal.

    A function that counts the total is called only if the bar is shown; None: nobody knows it.
    The block gets a function to be told how many are done.
    """
    if not (shown and _is_lively(sys.stderr)):
        yield lambda done: None  # noqa: ARG005 - nobody looks
        return
    if callable(total):
        total = total()
    from rich import progress as rich  # noqa: PLC0415 - only for people
    from rich.console import Console  # noqa: PLC0415

    console = Console(stderr=True)
    columns: list[rich.ProgressColumn] = [rich.TextColumn("{task.completed:,.0f} " + unit)]
    if console.width >= 60:  # with less, rich would cut off digits
        columns = [rich.TextColumn("{task.description}"), *columns, rich.TimeRemainingColumn()]
    if console.width >= 100:
        columns[1:1] = [rich.BarColumn(bar_width=None)]
        columns[-1:-1] = [rich.TextColumn("{task.fields[rate]}"), rich.TimeElapsedColumn()]
    begun = last = time.monotonic()
    with rich.Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=total, rate="")

        def advance(done: int) -> None:
            nonlocal last
            now = time.monotonic()
            if now - last >= _ADVANCE_SECS:
                last = now
                bar.update(task, completed=done, rate=f"{done / (now - begun):,.0f}/s")

        yield advance
