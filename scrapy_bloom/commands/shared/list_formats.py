"""Formats of lists: plain text, JSON lines, a JSON array, CSV; each also packed by gzip."""

import codecs
import gzip
import io
import json
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from scrapy_bloom.commands.shared.list_records import (
    CHUNK_BYTES,
    MAX_LINE_BYTES,
    Array,
    Entry,
    Table,
    too_long,
    url_in,
)
from scrapy_bloom.commands.shared.readiness import readiness
from scrapy_bloom.exceptions import StorageError

FORMATS = ("urls", "jl", "json", "csv")
UNREADABLE = (OSError, EOFError, zlib.error)  # what is raised where a file ends or is damaged

_GZIP = b"\x1f\x8b"
_ENDINGS = {".jl": "jl", ".jsonl": "jl", ".ndjson": "jl", ".csv": "csv"}
_BEGINNINGS = {b"{": "jl", b"[": "json"}
_BEGINNING_SECS = 1.0  # of a pipe: what gives no whole chunk by then needs no processes

Chunk = Any  # a part of a list, which can be pickled; what it is depends on the format


class Source(NamedTuple):
    """An opened list: its chunks, and what becomes of them."""

    file: io.BufferedReader
    is_large: bool  # more than one chunk
    chunks: Iterator[Chunk]
    entries: Callable[[Chunk], Iterable[Entry]]  # that are not empty
    url: Callable[[Any], str]  # that of an entry; a ValueError says that it has none


@contextmanager
def opened_list(path: Path | None, form: str | None, field: str) -> Iterator[Source]:
    """Open a list; for the arguments, see `UrlList`. Raises StorageError (while reading, too)."""
    name = str(path or "the standard input")
    try:
        with opened(path) as file:
            form = form or format_of(path, file)
            first, is_over = _beginning(file)
            is_large = len(first) == CHUNK_BYTES
            read = bytes if is_over else partial(file.read1, CHUNK_BYTES)
            if form == "json":
                array = Array(name, field, chain([first], iter(read, b"")))
                yield Source(file, is_large, array.chunks(), iter, array.url)
                return
            blocks = _blocks(name, first, read)
            if form == "csv":
                table = Table(name, field, blocks)
                yield Source(file, is_large, table.chunks(), iter, table.url)
            else:
                url = partial(_url_in_object, field) if form == "jl" else _decoded
                yield Source(file, is_large, blocks, _full_lines, url)
    except UNREADABLE as error:
        raise StorageError(f"{name} cannot be read: {reason(error)}") from error


def reason(error: Exception) -> str:
    """Return what one of `UNREADABLE` says, without the path."""
    return str(getattr(error, "strerror", None) or error)


@contextmanager
def opened(path: Path | None) -> Iterator[io.BufferedReader]:
    """Open a file, or the standard input (None), and unpack what begins as gzip packs it.

    Raises one of `UNREADABLE` if it cannot be read (while reading, too).
    """
    with ExitStack() as stack:
        file: Any = sys.stdin.buffer if path is None else stack.enter_context(path.open("rb"))
        if file.peek(len(_GZIP)).startswith(_GZIP):
            packed = stack.enter_context(gzip.GzipFile(fileobj=file))
            file = stack.enter_context(io.BufferedReader(packed))
        yield file


def format_of(path: Path | None, file: io.BufferedReader) -> str:
    """Return the format of a list, by the ending of its name or else by its beginning."""
    ending = Path(path.name.lower().removesuffix(".gz")).suffix if path else ""
    beginning = file.peek(1).removeprefix(codecs.BOM_UTF8).lstrip()[:1]
    return _ENDINGS.get(ending) or _BEGINNINGS.get(beginning, "urls")


def _beginning(file: io.BufferedReader) -> tuple[bytes, bool]:
    """Return the first chunk, or what a pipe gives in a second; and whether that is all."""
    is_ready = readiness(file)
    data = file.read1(CHUNK_BYTES)
    deadline = time.monotonic() + _BEGINNING_SECS
    while 0 < len(data) < CHUNK_BYTES:
        if not is_ready(max(0.0, deadline - time.monotonic())):
            return data, False
        more = file.read1(CHUNK_BYTES - len(data))
        if not more:
            return data, True
        data += more
    return data, not data


def _blocks(name: str, first: bytes, read: Callable[[], bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield whole lines, as many as come at once, behind the number of the first of them."""
    number, data, more = 1, first.removeprefix(codecs.BOM_UTF8), first
    while more:
        # Of all lines, only the first one may have begun in an earlier block.
        if len(data) >= MAX_LINE_BYTES and not 0 <= data.find(b"\n") < MAX_LINE_BYTES - 1:
            raise too_long(name, number)
        if end := data.rfind(b"\n") + 1:
            yield number, data[:end]
            number += data.count(b"\n")
        more = read()
        data = data[end:] + more
    if data:
        yield number, data


def _full_lines(block: tuple[int, bytes]) -> Iterator[Entry]:
    """Yield lines that are neither empty nor comments, behind their numbers."""
    number, data = block
    for raw in data.split(b"\n"):
        line = raw.strip()
        if line and line[:1] != b"#":
            yield number, line
        number += 1


def _url_in_object(field: str, line: bytes) -> str:
    try:
        return url_in(field, json.loads(_decoded(line)))
    except json.JSONDecodeError as error:
        raise ValueError(f"it is no JSON: {error.msg}") from None
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None


def _decoded(line: bytes) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError:
        raise ValueError("it is no text in UTF-8") from None
