"""Read lists of requests: a URL or a JSON object on each line.

A list is read in constant memory, and what comes from a pipe is yielded as soon as it arrives.
"""

import codecs
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Generic, TypeVar

from scrapy_bloom.exceptions import BloomError, StorageError
from scrapy_bloom.queues import inbox
from scrapy_bloom.text import counted

_MAX_LINE_BYTES = 1 << 24  # a longer line is not part of a list, and would fill the memory
_MAX_URL_LENGTH = 1 << 20  # characters; a fingerprint of a longer one would take seconds
_SCHEME = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*://|data:")  # as Scrapy recognizes absolute URLs

# What a JSON object may have for a request, in addition to the URL. An item of a crawl may have a
# field with one of these names, for example the text of an article, so a body needs a method.
_FIELDS: dict[str, Any] = {**inbox.VALUES, "callback": str}
del _FIELDS["url"]
Fields = Mapping[str, Any]
_T = TypeVar("_T")


@dataclass
class RequestList(Generic[_T]):
    """The requests of a command line: URLs, and lists of them.

    Lines without a URL are skipped and counted. A list whose first line has none is refused.
    """

    sources: Sequence[str]  # URLs, paths, and "-" for the standard input
    made: Callable[[str, Fields], _T]  # of a URL and its other fields; ValueError: it is not valid
    field: str = "url"  # field of the JSON objects with the URL
    read: int = 0  # valid lines so far
    skipped: int = 0  # lines so far that were not valid
    first_skipped: str = ""  # number of the first such line, and the reason

    def __iter__(self) -> Iterator[_T]:
        return chain.from_iterable(self.batches())

    def batches(self) -> Iterator[list[_T]]:
        """Yield what is made of each request, as soon as it is read; raises a StorageError."""
        for source in self.sources:
            is_list = False  # a line of it had a URL
            for lines in _lines(source):
                batch = []
                for number, line in lines:
                    try:
                        batch.append(self.made(*_parsed(line, self.field)))
                    except ValueError as error:  # also a lone surrogate, which cannot be encoded
                        why = str(error)[:200]  # some of Python's messages repeat the whole URL
                        if _SCHEME.match(source):
                            raise BloomError(f"{source!r} is not a URL: {why}") from None
                        if not is_list:
                            raise _no_list(source, f"line {number:,}: {why}") from None
                        self.skipped += 1
                        self.first_skipped = self.first_skipped or f"line {number:,}: {why}"
                    is_list = True
                self.read += len(batch)
                if batch:
                    yield batch

    def check_skipped(self) -> None:
        """Raise a BloomError if lines were left out because they are not valid."""
        if self.skipped:
            lines = counted(self.skipped, "line was not valid", "lines were not valid")
            raise BloomError(f"{lines}; the first: {self.first_skipped}")


def _lines(source: str) -> Iterator[list[tuple[int, bytes]]]:
    """Yield the lines that each part completes, with their numbers, without comments."""
    if _SCHEME.match(source):
        if source.lower().startswith(("redis", "unix")):
            raise BloomError(f"{source} is the URL of a server; give URLs of pages, or a list")
        yield [(1, source.encode())]
        return
    path, number, rest = Path(source) if source != "-" else None, 1, b""
    try:
        opened: Any = path.open("rb") if path else nullcontext(sys.stdin.buffer)
        with opened as file:
            if source.lower().endswith((".csv", ".tsv")):  # may begin with a URL
                raise _no_list(source, "line 1: it is a table")
            for part in chain(iter(partial(file.read1, 1 << 16), b""), [b"\n"]):
                *parts, rest = (rest + part).split(b"\n")
                lines = [line.removeprefix(codecs.BOM_UTF8).strip() for line in parts]
                yield [
                    (place, line)
                    for place, line in enumerate(lines, number)
                    if line and line[:1] != b"#"
                ]
                number += len(lines)
                if len(rest) >= _MAX_LINE_BYTES:
                    what = f"line {number:,} is longer than {_MAX_LINE_BYTES:,} bytes"
                    raise _no_list(source, what)
    except FileNotFoundError:
        raise StorageError(
            f"{source} does not exist; give a list, or a URL that begins with https://"
        ) from None
    except IsADirectoryError:
        raise StorageError(f"{source} is a directory; give a file with a list of URLs") from None
    except OSError as error:
        raise StorageError(f"{source} cannot be read: {error.strerror or error}") from error


def _no_list(source: str, reason: str) -> StorageError:
    return StorageError(
        f"{'the standard input' if source == '-' else source}, {reason}; a list has on each line a "
        "URL, or a JSON object with one in the field that --field names (convert an array or a "
        "table: jq -c '.[]' items.json > items.jl, or csvjson --stream items.csv > items.jl)"
    )


def _parsed(line: bytes, field: str) -> tuple[str, Fields]:
    """Return the URL in a line, and the other fields; raise a ValueError if there is no URL."""
    text = line.decode()  # a UnicodeDecodeError is a ValueError
    url, fields = _fields_of(text, field) if text[:1] == "{" else (text, {})
    url = url.strip()
    if len(url) > _MAX_URL_LENGTH:
        raise ValueError(f"its URL is longer than {_MAX_URL_LENGTH:,} characters")
    if not _SCHEME.match(url):
        start = repr(url[:60]) if url.isprintable() else "binary data"
        raise ValueError(f"Missing scheme, such as https://, in {start}")
    if "\n" in url or "\r" in url:
        raise ValueError("there is a line break in it")
    return url, fields


def _fields_of(text: str, field: str) -> tuple[str, Fields]:
    try:
        item: dict[str, Any] = json.loads(text)
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None
    url = item.get(field)
    if not isinstance(url, str):
        names = ", ".join(map(repr, list(item)[:20])) or "none"
        message = f"it has no text in {field!r} (--field); its fields: {names}"
        raise ValueError(message[:200])  # noqa: TRY004 - of the content, not of the code
    fields = {name: item[name] for name in _FIELDS if item.get(name) is not None}
    if "method" not in fields:
        fields.pop("body", None)
    for name, value in fields.items():
        if type(value) is not _FIELDS[name]:
            raise ValueError(f"its {name!r} is not of the type {_FIELDS[name].__name__}")
    return url, fields
