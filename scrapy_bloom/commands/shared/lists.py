"""Read lists of requests: a URL or a JSON object on each line.

A list is read in constant memory, and what comes from a pipe is yielded as soon as it arrives.
"""

import codecs
import json
import re
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from scrapy_bloom.exceptions import BloomError, StorageError
from scrapy_bloom.text import counted

_PART_BYTES = 1 << 16
_MAX_LINE_BYTES = 1 << 24  # a longer line is not part of a list, and would fill the memory
_MAX_URL_LENGTH = 1 << 20  # characters; a fingerprint of a longer one would take seconds
_SCHEME = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*://|data:")  # as Scrapy recognizes absolute URLs


# What a JSON object may have for a request, in addition to the URL. An item of a crawl may have a
# field with one of these names, for example the text of an article, so a body needs a method.
_FIELDS = {
    "method": str,
    "body": str,
    "headers": dict,
    "meta": dict,
    "cb_kwargs": dict,
    "priority": int,
    "callback": str,
    "dont_filter": bool,
}
Fields = Mapping[str, Any]
_T = TypeVar("_T")


@dataclass
class RequestList(Generic[_T]):
    """The requests of a command line: URLs, and lists of them.

    A line of a list is a URL, or a JSON object with one. A URL begins with a scheme and "://", or
    with "data:". Other lines are left out and counted, but if the first line has no URL, the file
    is refused. White space around a URL does not count.
    """

    sources: Sequence[str]  # URLs, paths, and "-" for the standard input
    made: Callable[[str, Fields], _T]  # of a URL and its other fields; ValueError: it is not valid
    field: str = "url"  # field of the JSON objects with the URL
    read: int = 0  # valid lines so far
    skipped: int = 0  # lines so far that were not valid
    first_skipped: str = ""  # number of the first such line, and the reason
    name: str = ""  # of the list that is being read, in messages
    is_at_start: bool = True  # whether it has had no line yet

    def count(self) -> int | None:
        """Count the lines, which reads the whole files; None for a pipe."""
        files = [Path(source) for source in self.sources if not _SCHEME.match(source)]
        if any(str(path) == "-" or (path.exists() and not path.is_file()) for path in files):
            return None  # a pipe can be read once only
        return sum(len(lines) for source in self.sources for lines in self._lines(source))

    def __iter__(self) -> Generator[_T, None, None]:
        for batch in self.batches():
            yield from batch

    def batches(self) -> Generator[list[_T], None, None]:
        """Yield what is made of each request, as soon as it is read.

        Raises StorageError if a file holds no URLs, BloomError if the fingerprinter fails.
        """
        for given, lines in (
            (source, lines) for source in self.sources for lines in self._lines(source)
        ):
            batch = []
            for number, line in lines:
                try:
                    batch.append(self.made(*_parsed(line, self.field)))
                except ValueError as why:  # also a lone surrogate, which cannot be encoded
                    # Some of Python's messages repeat the whole URL.
                    reason = f"line {number:,}: {str(why)[:200]}"
                    if _SCHEME.match(given):
                        raise BloomError(f"{given!r} is not a URL: {str(why)[:200]}") from None
                    if self.is_at_start:
                        raise self._no_list(reason) from None
                    self.skipped += 1
                    self.first_skipped = self.first_skipped or reason
                except BloomError:
                    raise
                except Exception as error:
                    raise BloomError(
                        f"{self.name}, line {number:,}: the project's request fingerprinter "
                        f"failed: {type(error).__name__}: {error}"
                    ) from error
                self.is_at_start = False
            self.read += len(batch)
            if batch:
                yield batch

    def _no_list(self, reason: str) -> StorageError:
        return StorageError(
            f"{self.name}, {reason}; a list has on each line a URL, or a JSON object with one in "
            "the field that --field names (convert an array or a table: jq -c '.[]' items.json > "
            "items.jl, or csvjson --stream items.csv > items.jl)"
        )

    def check_skipped(self) -> None:
        """Raise a BloomError if lines were left out because they are not valid."""
        if self.skipped:
            lines = counted(self.skipped, "line was not valid", "lines were not valid")
            raise BloomError(f"{lines}; the first: {self.first_skipped}")

    def _lines(self, source: str) -> Iterator[list[tuple[int, bytes]]]:
        """Yield the lines that are complete after each part that was read, with their numbers.

        Empty lines and comments are left out. Raises StorageError.
        """
        if _SCHEME.match(source):
            if source.lower().startswith(("redis", "unix")):
                raise BloomError(f"{source} is the URL of a server; give URLs of pages, or a list")
            yield [(1, source.encode())]
            return
        path = None if source == "-" else Path(source)
        self.name, self.is_at_start = str(path or "the standard input"), True
        try:
            opened: Any = path.open("rb") if path else nullcontext(sys.stdin.buffer)
            with opened as file:
                if self.name.lower().endswith((".csv", ".tsv")):  # may begin with a URL
                    raise self._no_list("line 1: it is a table")
                for block in self._blocks(iter(partial(file.read1, _PART_BYTES), b"")):
                    lines = [(number, raw.strip()) for number, raw in block]
                    yield [(number, line) for number, line in lines if line and line[:1] != b"#"]
        except FileNotFoundError:
            raise StorageError(
                f"{self.name} does not exist; give a list, or a URL that begins with https://"
            ) from None
        except OSError as error:
            raise StorageError(f"{self.name} cannot be read: {error.strerror or error}") from error

    def _blocks(self, parts: Iterable[bytes]) -> Iterator[list[tuple[int, bytes]]]:
        number, rest = 1, b""
        for index, part in enumerate(parts):
            new = part if index else part.removeprefix(codecs.BOM_UTF8)
            *lines, rest = (rest + new).split(b"\n")
            yield list(enumerate(lines, number))
            number += len(lines)
            if len(rest) >= _MAX_LINE_BYTES:
                raise self._no_list(f"line {number:,} is longer than {_MAX_LINE_BYTES:,} bytes")
        if rest:
            yield [(number, rest)]


def _parsed(line: bytes, field: str) -> tuple[str, Fields]:
    """Return the URL in a line, and the other fields; raise a ValueError if there is no URL."""
    try:
        text = line.decode()
    except UnicodeDecodeError:
        raise ValueError("it is not text in UTF-8") from None
    url, fields = _fields_of(text, field) if text[:1] == "{" else (text, {})
    url = url.strip()
    if len(url) > _MAX_URL_LENGTH:
        raise ValueError(f"its URL is longer than {_MAX_URL_LENGTH:,} characters")
    if not _SCHEME.match(url):
        shown = repr(url[:60]) if url.isprintable() else "binary data"
        raise ValueError(f"Missing scheme, such as https://, in {shown}")
    if "\n" in url or "\r" in url:
        raise ValueError("there is a line break in it")
    return url, fields


def _fields_of(text: str, field: str) -> tuple[str, Fields]:
    try:
        item: dict[str, Any] = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not valid JSON: {error.msg}") from None
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None
    url = item.get(field)
    if not isinstance(url, str):
        names = ", ".join(map(repr, list(item)[:20]))
        message = f"it has no text in {field!r} (--field); its fields: {names or 'none'}"
        raise ValueError(message[:200])  # noqa: TRY004 - of the content, not of the code
    fields = {name: item[name] for name in _FIELDS if item.get(name) is not None}
    if "method" not in fields:
        fields.pop("body", None)
    for name, value in fields.items():
        if type(value) is not _FIELDS[name]:
            kinds = {str: "a text", int: "a whole number", dict: "an object", bool: "true or false"}
            raise ValueError(f"its {name!r} is not {kinds[_FIELDS[name]]}")
    return url, fields
