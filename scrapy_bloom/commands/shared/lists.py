"""Read lists of URLs: plain text, JSON lines, a JSON array or CSV, also compressed with gzip.

A list is read in constant memory, and URLs from a pipe are yielded as soon as they arrive.
"""

import codecs
import csv
import gzip
import io
import json
import re
import sys
import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from scrapy_bloom.exceptions import BloomError, StorageError
from scrapy_bloom.text import counted

FORMATS = ("urls", "jl", "json", "csv")
UNREADABLE = (OSError, EOFError, zlib.error)  # raised for files that are damaged or cut off

_PART_BYTES = 1 << 16
_MAX_LINE_BYTES = 1 << 24  # a longer line is not part of a list, and would fill the memory
_GZIP = b"\x1f\x8b"
_ENDINGS = {".jl": "jl", ".jsonl": "jl", ".ndjson": "jl", ".csv": "csv"}
_BEGINNINGS = {b"{": "jl", b"[": "json"}
_SCHEME = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*://|data:")  # as Scrapy recognizes absolute URLs
_WHAT_IS_READ = (
    "a list has a URL on each line, or is JSON lines (.jl), a JSON array (.json) or a table (.csv) "
    "with one in the field that --field names; --format says which"
)

# For each part that was read, the lines or records that are complete: their numbers and contents.
_Entries = Iterator[list[tuple[int, Any]]]


def begins_with_scheme(text: str) -> bool:
    """Return whether a text begins as an absolute URL does."""
    return _SCHEME.match(text) is not None


def checked_urls(
    urls: Iterable[str], fingerprint: Callable[[str], bytes]
) -> Iterator[tuple[str, bytes]]:
    """Yield URLs of the command line with their fingerprints; raise a BloomError for others."""
    for url in urls:
        if not begins_with_scheme(url):
            raise BloomError(f"{url!r} is not a URL; give it in full, for example https://{url}")
        try:
            yield url, fingerprint(url)
        except ValueError as error:
            raise BloomError(f"{url!r} is not a URL: {error}") from None


@dataclass
class UrlList:
    """The URLs in a list, and their fingerprints.

    A URL begins with a scheme and "://", or with "data:". Other lines are left out and counted, but
    if the first line is not a URL, the file is refused. White space around a URL does not count.
    """

    path: Path | None  # None: the standard input
    fingerprint: Callable[[str], bytes]  # of a URL; raises a ValueError if it is not valid
    form: str | None = None  # one of FORMATS; None: by the name and the beginning of the file
    field: str = "url"  # field of a JSON object, or column of a table, with the URL
    skipped: int = 0  # lines so far that were not URLs
    first_skipped: str = ""  # number of the first such line, and the reason

    @property
    def name(self) -> str:
        """Name of the list in messages."""
        return str(self.path or "the standard input")

    def count(self) -> int | None:
        """Count the lines or records, which reads the whole file; None for a pipe."""
        if self.path is None or (self.path.exists() and not self.path.is_file()):
            return None  # a pipe can be read once only
        with self._opened() as (entries, _):
            return sum(map(len, entries))

    def __iter__(self) -> Generator[bytes, None, None]:
        for batch in self.batches():
            for _, fingerprint in batch:
                yield fingerprint

    def batches(self) -> Generator[list[tuple[bytes, bytes]], None, None]:
        """Yield URLs with their fingerprints, as soon as they are read.

        Raises StorageError if the file holds no URLs, BloomError if the fingerprinter fails.
        """
        is_first = True
        with self._opened() as (entries, url_of):
            for some in entries:
                batch: list[tuple[bytes, bytes]] = []
                for number, found in some:
                    try:
                        url = url_of(found).strip()
                        _check_url(url)
                        batch.append((url.encode(), self._fingerprint_of(url, number)))
                    except ValueError as why:  # also a lone surrogate, which cannot be encoded
                        # Some of Python's messages repeat the whole URL.
                        reason = f"line {number:,}: {str(why)[:200]}"
                        if is_first:
                            raise StorageError(f"{self.name}, {reason}; {_WHAT_IS_READ}") from None
                        self.skipped += 1
                        self.first_skipped = self.first_skipped or reason
                    is_first = False
                if batch:
                    yield batch

    def check_skipped(self) -> None:
        """Raise a BloomError if lines were left out because they are not URLs."""
        if self.skipped:
            lines = counted(
                self.skipped, "line is not a URL and was", "lines are not URLs and were"
            )
            raise BloomError(f"{lines} left out; the first: {self.first_skipped}")

    @contextmanager
    def _opened(self) -> Iterator[tuple[_Entries, Callable[[Any], str]]]:
        """Open the list; return its entries, and a function that returns the URL of an entry.

        The function raises a ValueError without a URL. Opening and reading raise a StorageError.
        """
        try:
            with opened(self.path) as file:
                form = self.form or format_of(self.path, file)
                parts = iter(partial(file.read1, _PART_BYTES), b"")
                if form == "json":
                    yield _elements(self.name, parts), partial(_url_in, self.field)
                elif form == "csv":
                    yield _rows(self.name, self.field, parts), partial(_cell, self.field)
                else:
                    url_of = partial(_url_in_object, self.field) if form == "jl" else _decoded
                    yield _lines(self.name, parts), url_of
        except UNREADABLE as error:
            raise StorageError(f"{self.name} cannot be read: {reason_of(error)}") from error

    def _fingerprint_of(self, url: str, number: int) -> bytes:
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


@contextmanager
def opened(path: Path | None) -> Iterator[io.BufferedReader]:
    """Open a file, or the standard input (None); decompress it if it begins as a gzip file.

    Opening and reading raise one of `UNREADABLE`.
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


def reason_of(error: Exception) -> str:
    """Return the message of one of `UNREADABLE`, without the path."""
    return str(getattr(error, "strerror", None) or error)


def _check_url(url: str) -> None:
    if not begins_with_scheme(url):
        shown = repr(url[:60]) if url.isprintable() else "binary data"
        raise ValueError(f"Missing scheme, such as https://, in {shown}")
    if "\n" in url or "\r" in url:
        raise ValueError("there is a line break in it")


def _decoded(line: bytes) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError:
        raise ValueError("it is not text in UTF-8") from None


def _url_in_object(field: str, line: bytes) -> str:
    try:
        return _url_in(field, json.loads(_decoded(line)))
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not valid JSON: {error.msg}") from None
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None


def _url_in(field: str, found: Any) -> str:
    url = found.get(field) if isinstance(found, dict) else None
    if not isinstance(url, str):
        fields = ", ".join(map(repr, list(found)[:20])) if isinstance(found, dict) else ""
        message = f"it has no text in {field!r} (--field); its fields: {fields or 'none'}"
        raise ValueError(message[:200])  # noqa: TRY004 - of the content, not of the code
    return url


def _cell(field: str, cells: list[str]) -> str:
    if not cells:
        raise ValueError(f"it has no column {field!r}")
    return cells[0]


def _too_long(name: str, number: int) -> StorageError:
    return StorageError(
        f"{name}: line {number:,} is longer than {_MAX_LINE_BYTES:,} bytes; give a list with a "
        "URL, or an object with one, on each line"
    )


def _blocks(name: str, parts: Iterable[bytes]) -> Iterator[list[tuple[int, bytes]]]:
    """Yield the lines that are complete after each part, with their numbers."""
    number, rest = 1, b""
    for index, part in enumerate(parts):
        *lines, rest = (rest + (part if index else part.removeprefix(codecs.BOM_UTF8))).split(b"\n")
        yield list(enumerate(lines, number))
        number += len(lines)
        if len(rest) >= _MAX_LINE_BYTES:
            raise _too_long(name, number)
    if rest:
        yield [(number, rest)]


def _lines(name: str, parts: Iterable[bytes]) -> _Entries:
    """Yield lines that are neither empty nor comments."""
    for block in _blocks(name, parts):
        lines = [(number, raw.strip()) for number, raw in block]
        yield [(number, line) for number, line in lines if line and line[:1] != b"#"]


def _rows(name: str, field: str, parts: Iterable[bytes]) -> _Entries:
    """Yield the cell with the URL of each row of a table, as a list; it is empty without a URL."""
    waiting: deque[tuple[int, bytes]] = deque()  # lines of the part that was read last
    record_bytes = 0  # of the lines since the last whole row

    def lines() -> Iterator[str]:
        nonlocal record_bytes
        for block in _blocks(name, parts):
            waiting.extend(block)
            while waiting:
                number, line = waiting.popleft()
                record_bytes += len(line) + 1
                if record_bytes > _MAX_LINE_BYTES:
                    raise _too_long(name, number)
                yield line.decode(errors="surrogateescape") + "\n"

    csv.field_size_limit(_MAX_LINE_BYTES)
    reader = csv.reader(lines())
    try:
        names = next(filter(None, reader), [field])
        if field not in names:
            columns = ", ".join(map(repr, names[:20]))[:200]
            raise StorageError(f"{name} has no column {field!r} (--field); its columns: {columns}")
        column, found = names.index(field), []
        for row in reader:
            record_bytes = 0
            if row and row != names:  # Scrapy appends tables with their header
                found.append((reader.line_num, row[column : column + 1]))
            if not waiting:
                yield found
                found = []
    except csv.Error as error:
        raise StorageError(f"{name}: line {reader.line_num:,}: {error}") from error


def _damaged(name: str, line: int, why: str) -> StorageError:
    return StorageError(
        f"{name}: line {line:,}: the JSON array is damaged or cut off here: {why}; repair it, or "
        "give a list with a URL, or an object with one, on each line"
    )


_BETWEEN = re.compile(r"[ \t\r\n,\[\]]*")


def _elements(name: str, parts: Iterable[bytes]) -> _Entries:
    """Yield the elements of an array in JSON, or of several: Scrapy appends one to another.

    Only the elements and the last "]" are checked, not the commas, which contain no URL.
    """
    decode = codecs.getincrementaldecoder("utf-8-sig")("surrogateescape").decode
    # int() refuses numbers of too many digits.
    element_at = json.JSONDecoder(parse_int=float).raw_decode
    text, line, enough, last_mark = "", 1, 0, ""

    for part in chain(parts, [b""]):
        text += decode(part, not part)
        # A long element is not parsed again after each part, which would take quadratic time.
        if part and len(text) < enough:
            continue
        at, found = 0, []
        while between := _BETWEEN.match(text, at):
            line += between[0].count("\n")
            at = between.end()
            last_mark = between[0].rstrip()[-1:] or last_mark
            if at == len(text):
                break
            try:
                element, end = element_at(text, at)
            except (json.JSONDecodeError, RecursionError) as error:
                if part and isinstance(error, json.JSONDecodeError):
                    break
                why = getattr(error, "msg", "it is nested too deeply")
                raise _damaged(name, line, why) from None
            if part and end == len(text) and isinstance(element, float):
                break  # the number may go on
            found.append((line, element))
            line += text.count("\n", at, end)
            at, last_mark = end, ""
        text = text[at:]
        yield found
        if len(text) > _MAX_LINE_BYTES:
            raise _too_long(name, line)
        enough = min(2 * len(text), _MAX_LINE_BYTES + 1) if len(text) > _PART_BYTES else 0
    if last_mark != "]":
        raise _damaged(name, line, "it ends without its ]")
