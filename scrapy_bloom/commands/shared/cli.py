"""Define the arguments that several subcommands share, and print tables, JSON and notes.

Figures go to the standard output, everything else to the error output.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from scrapy_bloom.exceptions import BloomError
from scrapy_bloom.text import escaped, masked

PLACE = "JOBDIR|REDIS-URL#KEY"
PROJECTS_SERVER = "redis"  # in place of a URL
_PLACE: dict[str, Any] = {
    "metavar": PLACE,
    "help": "a JOBDIR; or a server and the name of a filter there. The word redis in place of a "
    "URL is the server of the project's settings. Without a password, REDISCLI_AUTH is used",
}
_SHARED: dict[str, dict[str, Any]] = {
    "place": _PLACE,
    "[place]": {**_PLACE, "nargs": "?"},  # by default, that of the project's settings
    "--spider": {
        "metavar": "NAME",
        "help": "whose custom_settings count, and whose name is put into BLOOM_REDIS_KEY if there "
        "is no #KEY",
    },
    "requests": {
        "metavar": "URL|URLFILE",
        "nargs": "+",
        "help": 'a URL, or a list of URLs or JSON objects; "-": the standard input',
    },
    "--field": {
        "metavar": "NAME",
        "default": "url",
        "help": "the field with the URL, in a list of JSON objects (default: url)",
    },
    "--json": {"action": "store_true", "help": "print the figures as JSON"},
    "--yes": {"action": "store_true", "help": "do not ask"},
}
Figures: TypeAlias = dict[str, Any]  # as JSON has them
# For each column, its name, the key of a figure in each row, and what makes the text of a figure.
# A column whose name ends with ":" has text, aligned to the left.
Columns: TypeAlias = Sequence[tuple[str, str, Callable[[Any], str]]]


def add_shared(parser: argparse._ActionsContainer, *names: str) -> None:
    """Add arguments that several subcommands have; "[place]" is a place that may be missing."""
    for name in names:
        flags = ["-y", name] if name == "--yes" else [name.strip("[]")]
        parser.add_argument(*flags, **_SHARED[name])


def print_json(figures: Any, *, indent: int | None = 2) -> None:
    """Print figures for a program."""
    sys.stdout.write(json.dumps(figures, indent=indent) + "\n")


def print_table(columns: Columns, rows: Sequence[Figures]) -> None:
    """Print rows below the names of those columns of which a figure is known."""
    table = []
    for name, key, text in columns:
        figures = [row[key] for row in rows]
        if any(figure is not None for figure in figures):
            texts = ["-" if figure is None else escaped(text(figure)) for figure in figures]
            texts.insert(0, name.removesuffix(":"))
            width, side = max(map(len, texts)), "<" if name.endswith(":") else ">"
            table.append([f"{cell:{side}{width}}" for cell in texts])
    for line in zip(*table, strict=True):
        say("  ".join(line).rstrip())


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
