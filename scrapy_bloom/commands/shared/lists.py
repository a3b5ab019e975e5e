"""Read lists of URLs: one per line, as plain text or in a JSON object, also compressed with gzip.

A list is read in constant memory, and URLs from a pipe are yielded as soon as they arrive.
"""

import codecs
import gzip
import io
import json
import re
import sys
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from scrapy_bloom.exceptions import BloomError, StorageError
from scrapy_bloom.text import counted

UNREADABLE = (OSError, EOFError, zlib.error)  # raised for files that are damaged or cut off

_PART_BYTES = 1 << 16
_MAX_LINE_BYTES = 1 << 24  # a longer line is not part of a list, and would fill the memory
_GZIP = b"\x1f\x8b"
_SCHEME = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*://|data:")  # as Scrapy recognizes absolute URLs


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

    A line is a URL, or a JSON object with one. A URL begins with a scheme and "://", or with
    "data:". Other lines are left out and counted, but if the first line has no URL, the file is
    refused. White space around a URL does not count.
    """

    path: Path | None  # None: the standard input
    fingerprint: Callable[[str], bytes]  # of a URL; raises a ValueError if it is not valid
    field: str = "url"  # field of the JSON objects with the URL
    skipped: int = 0  # lines so far that were not URLs
    first_skipped: str = ""  # number of the first such line, and the reason

    @property
    def name(self) -> str:
        """Name of the list in messages."""
        return str(self.path or "the standard input")

    def count(self) -> int | None:
        """Count the lines, which reads the whole file; None for a pipe."""
        if self.path is None or (self.path.exists() and not self.path.is_file()):
            return None  # a pipe can be read once only
        return sum(map(len, self._lines()))

    def __iter__(self) -> Generator[bytes, None, None]:
        for batch in self.batches():
            for _, fingerprint in batch:
                yield fingerprint

    def batches(self) -> Generator[list[tuple[bytes, bytes]], None, None]:
        """Yield URLs with their fingerprints, as soon as they are read.

        Raises StorageError if the file holds no URLs, BloomError if the fingerprinter fails.
        """
        is_first = True
        for lines in self._lines():
            batch: list[tuple[bytes, bytes]] = []
            for number, line in lines:
                try:
                    url = _url_of(line, self.field)
                    batch.append((url.encode(), self._fingerprint_of(url, number)))
                except ValueError as why:  # also a lone surrogate, which cannot be encoded
                    # Some of Python's messages repeat the whole URL.
                    reason = f"line {number:,}: {str(why)[:200]}"
                    if is_first and b"," in line and line[:1] != b"{":
                        raise self._table() from None
                    if is_first:
                        raise StorageError(
                            f"{self.name}, {reason}; a list has on each line a URL, or a JSON "
                            "object with one in the field that --field names"
                        ) from None
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

    def _lines(self) -> Iterator[list[tuple[int, bytes]]]:
        """Yield the lines that are complete after each part that was read, with their numbers.

        Empty lines and comments are left out. Raises StorageError.
        """
        try:
            with opened(self.path) as file:
                self._check_format(file)
                for block in self._blocks(iter(partial(file.read1, _PART_BYTES), b"")):
                    lines = [(number, raw.strip()) for number, raw in block]
                    yield [(number, line) for number, line in lines if line and line[:1] != b"#"]
        except UNREADABLE as error:
            raise StorageError(f"{self.name} cannot be read: {reason_of(error)}") from error

    def _check_format(self, file: io.BufferedReader) -> None:
        """Raise a StorageError if the list is in a format that other programs convert."""
        if file.peek(1).removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"[":
            raise StorageError(
                f"{self.name} is a JSON array, and a list has one JSON object per line. Convert "
                "it: jq -c '.[]' items.json > items.jl"
            )
        # A table without a header may begin with a URL.
        if self.path and self.path.name.lower().removesuffix(".gz").endswith((".csv", ".tsv")):
            raise self._table()

    def _table(self) -> StorageError:
        return StorageError(
            f"{self.name} is a table, and a list has one URL or JSON object per line. Convert it: "
            "csvjson --stream items.csv > items.jl"
        )

    def _blocks(self, parts: Iterable[bytes]) -> Iterator[list[tuple[int, bytes]]]:
        number, rest = 1, b""
        for index, part in enumerate(parts):
            new = part if index else part.removeprefix(codecs.BOM_UTF8)
            *lines, rest = (rest + new).split(b"\n")
            yield list(enumerate(lines, number))
            number += len(lines)
            if len(rest) >= _MAX_LINE_BYTES:
                raise StorageError(
                    f"{self.name}: line {number:,} is longer than {_MAX_LINE_BYTES:,} bytes; give "
                    "a list with a URL, or an object with one, on each line"
                )
        if rest:
            yield [(number, rest)]

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


def reason_of(error: Exception) -> str:
    """Return the message of one of `UNREADABLE`, without the path."""
    return str(getattr(error, "strerror", None) or error)


def _url_of(line: bytes, field: str) -> str:
    """Return the URL in a line; raise a ValueError if there is none."""
    try:
        text = line.decode()
    except UnicodeDecodeError:
        raise ValueError("it is not text in UTF-8") from None
    url = (_field_of(text, field) if text[:1] == "{" else text).strip()
    if not begins_with_scheme(url):
        shown = repr(url[:60]) if url.isprintable() else "binary data"
        raise ValueError(f"Missing scheme, such as https://, in {shown}")
    if "\n" in url or "\r" in url:
        raise ValueError("there is a line break in it")
    return url


def _field_of(text: str, field: str) -> str:
    try:
        item: dict[str, Any] = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not valid JSON: {error.msg}") from None
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None
    url = item.get(field)
    if not isinstance(url, str):
        fields = ", ".join(map(repr, list(item)[:20]))
        message = f"it has no text in {field!r} (--field); its fields: {fields or 'none'}"
        raise ValueError(message[:200])  # noqa: TRY004 - of the content, not of the code
    return url
