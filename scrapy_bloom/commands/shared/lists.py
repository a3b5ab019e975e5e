"""Lists of URLs: plain text, JSON lines, CSV; each also packed by gzip."""

import codecs
import csv
import gzip
import io
import json
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from scrapy_bloom.exceptions import BloomError, StorageError

FORMATS = ("urls", "jl", "csv")
UNREADABLE = (OSError, EOFError, zlib.error)  # what is raised where a file ends or is damaged

_SCHEME = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*://")
_WHAT_IS_READ = (
    "a list has a URL on each line, or is JSON lines (.jl) or a table (.csv) with one in the field "
    "that --field names; --format says which"
)
_GZIP = b"\x1f\x8b"
_ENDINGS = {".jl": "jl", ".jsonl": "jl", ".ndjson": "jl", ".csv": "csv"}
_MAX_LINE_BYTES = 1 << 24  # what is longer is no list, and would fill the memory


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
    begins_with_object = file.peek(1).lstrip().startswith(b"{")
    return _ENDINGS.get(ending) or ("jl" if begins_with_object else "urls")


def begins_with_scheme(text: str) -> bool:
    """Return whether a text begins as an absolute URL does."""
    return _SCHEME.match(text) is not None


# Each line or record of a list that is not empty, behind its number; and what returns the URL in
# one of them, or says by a ValueError that there is none.
_Entries = tuple[Iterator[tuple[int, Any]], Callable[[Any], str]]


@dataclass
class UrlList:
    """The URLs in a list, and their fingerprints; in constant memory.

    A URL begins with a scheme and "://". Other lines are left out and counted; if the first line is
    one of them, this is no list of URLs. White space around a URL does not count.
    """

    path: Path | None  # None: the standard input
    fingerprint: Callable[[str], bytes]  # of a URL; a ValueError says that it is none
    form: str | None = None  # one of FORMATS; None: what the file looks like
    field: str = "url"  # which field of a JSON object, or column of a table, has the URL
    skipped: int = 0  # lines so far that were no URL
    first_skipped: str = ""  # the first of them, for people: its number, and why

    @property
    def name(self) -> str:
        """Name of the list in messages."""
        return str(self.path or "the standard input")

    def count(self) -> int | None:
        """Count the lines or records, which reads all of the file; None if nobody knows before."""
        if self.path is None or (self.path.exists() and not self.path.is_file()):
            return None  # a pipe can be read once only
        with self._read() as (entries, _):
            return sum(1 for _ in entries)

    def __iter__(self) -> Iterator[bytes]:
        return (fingerprint for _, fingerprint in self.pairs())

    def pairs(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield each URL and its fingerprint.

        Raises StorageError if the file holds no URLs, BloomError if the fingerprinter fails.
        """
        with self._read() as (entries, url_of):
            for index, (number, entry) in enumerate(entries):
                try:
                    url = url_of(entry).strip()
                    _check_scheme(url)
                    pair = url.encode(), self._fingerprinted(url, number)
                except ValueError as error:
                    told = f"line {number:,}: {error}"
                    if index == 0:
                        raise StorageError(f"{self.name}, {told}; {_WHAT_IS_READ}") from None
                    self.skipped += 1
                    self.first_skipped = self.first_skipped or told
                else:
                    yield pair

    def check_skipped(self) -> None:
        """Raise a BloomError if lines were left out, since they are no URLs."""
        if self.skipped:
            raise BloomError(
                f"{self.skipped:,} lines are no URLs and were left out; the first: "
                f"{self.first_skipped}"
            )

    @contextmanager
    def _read(self) -> Iterator[_Entries]:
        try:
            with opened(self.path) as file:
                form, lines = self.form or format_of(self.path, file), self._lines(file)
                if form == "csv":
                    yield self._table(lines)
                    return
                # Empty lines and comments are none of the list's.
                full = ((n, line) for n, raw in lines if (line := raw.strip()) and line[:1] != b"#")
                yield full, self._url_in_object if form == "jl" else _decoded
        except UNREADABLE as error:
            raise StorageError(f"{self.name} cannot be read: {reason(error)}") from error

    def _lines(self, file: BinaryIO) -> Iterator[tuple[int, bytes]]:
        for number, line in enumerate(iter(partial(file.readline, _MAX_LINE_BYTES), b""), 1):
            if len(line) == _MAX_LINE_BYTES:
                raise StorageError(
                    f"{self.name}: line {number:,} is longer than {_MAX_LINE_BYTES:,} bytes; give "
                    "a list with a URL, or an object with one, on each line"
                )
            yield number, line.removeprefix(codecs.BOM_UTF8) if number == 1 else line

    def _table(self, lines: Iterator[tuple[int, bytes]]) -> _Entries:
        names: list[str] = []
        reader = csv.reader(line.decode(errors="surrogateescape") for _, line in lines)

        def rows() -> Iterator[tuple[int, list[str]]]:
            try:
                for row in reader:
                    if row and row != names:  # Scrapy appends a table to a table, with its names
                        yield reader.line_num, row
            except csv.Error as error:
                raise StorageError(f"{self.name}: line {reader.line_num:,}: {error}") from error

        entries = rows()
        _, names = next(entries, (0, [self.field]))
        if self.field not in names:
            columns = ", ".join(map(repr, names[:20]))[:200]
            raise StorageError(
                f"{self.name} has no column {self.field!r} (--field); its columns: {columns}"
            )
        column = names.index(self.field)

        def url(row: list[str]) -> str:
            if len(row) <= column:
                raise ValueError(f"it has no column {self.field!r}")
            return row[column]

        return entries, url

    def _url_in_object(self, line: bytes) -> str:
        try:
            found = json.loads(_decoded(line))
        except json.JSONDecodeError as error:
            raise ValueError(f"it is no JSON: {error.msg}") from None
        except RecursionError:
            raise ValueError("its JSON is nested too deeply") from None
        url = found.get(self.field) if isinstance(found, dict) else None
        if not isinstance(url, str):
            fields = ", ".join(map(repr, list(found)[:20])) if isinstance(found, dict) else ""
            message = f"it has no text in {self.field!r} (--field); its fields: {fields or 'none'}"
            raise ValueError(message[:200])  # noqa: TRY004 - of the content, not of the code
        return url

    def _fingerprinted(self, url: str, number: int) -> bytes:
        try:
            fingerprint = self.fingerprint(url)
        except ValueError:
            raise
        except Exception as error:
            raise BloomError(
                f"{self.name}, line {number:,}: the project's request fingerprinter failed: "
                f"{type(error).__name__}: {error}"
            ) from error
        if not isinstance(fingerprint, bytes):
            raise BloomError(
                "the project's request fingerprinter returns "
                f"{type(fingerprint).__name__}, not bytes; no crawl could use it, either"
            )
        return fingerprint


def _check_scheme(url: str) -> None:
    if not begins_with_scheme(url):
        shown = repr(url[:60]) if url.isprintable() else "binary data"
        raise ValueError(f"Missing scheme, such as https://, in {shown}")
    if "\n" in url or "\r" in url:
        raise ValueError("there is a line break in it")


def _decoded(line: bytes) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError:
        raise ValueError("it is no text in UTF-8") from None
