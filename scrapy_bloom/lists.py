"""Lists of URLs: plain text, JSON lines, CSV; each also packed by gzip."""

import codecs
import csv
import gzip
import io
import json
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from scrapy_bloom.exceptions import StorageError

FORMATS = ("urls", "jl", "csv")
UNREADABLE = (OSError, EOFError, zlib.error)  # what is raised where a file ends or is damaged

_GZIP = b"\x1f\x8b"
_ENDINGS = {".jl": "jl", ".jsonl": "jl", ".ndjson": "jl", ".csv": "csv"}
_MAX_LINE_BYTES = 1 << 24  # what is longer is no list, and would fill the memory


class Entries(NamedTuple):
    """The content of a list.

    Attributes:
        entries: each line or record that is not empty, behind its number.
        url: returns the URL in one of them. A ValueError says that there is none.
    """

    entries: Iterator[tuple[int, Any]]
    url: Callable[[Any], str]


def reason(error: Exception) -> str:
    """Return what one of `UNREADABLE` says, without the path."""
    return str(getattr(error, "strerror", None) or error)


@contextmanager
def opened(path: Path | None) -> Iterator[io.BufferedReader]:
    """Open a file, or the standard input (None), and unpack what begins as gzip packs it.

    Raises:
        UNREADABLE: it cannot be read (while reading, too).
    """
    with ExitStack() as stack:
        file: Any = sys.stdin.buffer if path is None else stack.enter_context(path.open("rb"))
        if file.peek(len(_GZIP)).startswith(_GZIP):
            packed = stack.enter_context(gzip.GzipFile(fileobj=file))
            file = stack.enter_context(io.BufferedReader(packed))
        yield file


def format_of(path: Path | None, file: io.BufferedReader) -> str:
    """Return the format of a list, by the ending of its name or else by its beginning."""
    endings = [each.lower() for each in path.suffixes] if path else []
    if endings[-1:] == [".gz"]:
        del endings[-1]
    if endings and endings[-1] in _ENDINGS:
        return _ENDINGS[endings[-1]]
    return "jl" if file.peek(1).lstrip().startswith(b"{") else "urls"


def read_list(file: BinaryIO, form: str, field: str, name: str) -> Entries:
    """Read a list of URLs in constant memory.

    Args:
        file: where it begins.
        form: one of `FORMATS`.
        field: which field of a JSON object, or which column of a table, has the URL.
        name: where the list is, for people.

    Raises:
        StorageError: (while reading, too) it is no such list.
    """
    lines = _lines(file, name)
    if form == "csv":
        return _table(lines, field, name)
    # Empty lines and comments are none of the list's.
    entries = ((n, line) for n, each in lines if (line := each.strip()) and line[:1] != b"#")
    return Entries(entries, partial(_url_in_object, field=field) if form == "jl" else _decoded)


def _lines(file: BinaryIO, name: str) -> Iterator[tuple[int, bytes]]:
    for number, line in enumerate(iter(partial(file.readline, _MAX_LINE_BYTES), b""), 1):
        if len(line) == _MAX_LINE_BYTES:
            raise StorageError(
                f"{name}: line {number:,} is longer than {_MAX_LINE_BYTES:,} bytes; give a list "
                "with a URL, or an object with one, on each line"
            )
        yield number, line.removeprefix(codecs.BOM_UTF8) if number == 1 else line


def _decoded(line: bytes) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError:
        raise ValueError("it is no text in UTF-8") from None


def _url_in_object(line: bytes, *, field: str) -> str:
    try:
        found = json.loads(_decoded(line))
    except json.JSONDecodeError as error:
        raise ValueError(f"it is no JSON: {error.msg}") from None
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None
    url = found.get(field) if isinstance(found, dict) else None
    if not isinstance(url, str):
        fields = ", ".join(map(repr, list(found)[:20])) if isinstance(found, dict) else ""
        message = f"it has no text in {field!r} (--field); its fields: {fields or 'none'}"
        raise ValueError(message[:200])  # noqa: TRY004 - of the content, not of the code
    return url


def _table(lines: Iterator[tuple[int, bytes]], field: str, name: str) -> Entries:
    names: list[str] = []
    reader = csv.reader(line.decode(errors="surrogateescape") for _, line in lines)

    def rows() -> Iterator[tuple[int, list[str]]]:
        try:
            for row in reader:
                if row and row != names:  # Scrapy appends a table to a table, with its names
                    yield reader.line_num, row
        except csv.Error as error:
            raise StorageError(f"{name}: line {reader.line_num:,}: {error}") from error

    entries = rows()
    _, names = next(entries, (0, [field]))
    if field not in names:
        columns = ", ".join(map(repr, names[:20]))[:200]
        raise StorageError(f"{name} has no column {field!r} (--field); its columns: {columns}")
    column = names.index(field)

    def url(row: list[str]) -> str:
        if len(row) <= column:
            raise ValueError(f"it has no column {field!r}")
        return row[column]

    return Entries(entries, url)
