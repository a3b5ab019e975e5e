"""Lists whose records may stand on many lines: tables (CSV) and arrays in JSON."""

import codecs
import csv
import io
import json
import re
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from scrapy_bloom.exceptions import StorageError

MAX_LINE_BYTES = 1 << 24  # what is longer is no list, and would fill the memory
CHUNK_BYTES = 1 << 18

Entry = tuple[int, Any]  # a line or record, behind its number


def too_long(name: str, number: int) -> StorageError:
    """Return the error of a line or record that would fill the memory."""
    return StorageError(
        f"{name}: line {number:,} is longer than {MAX_LINE_BYTES:,} bytes; give a list with a "
        "URL, or an object with one, on each line"
    )


class Table:
    """The rows of a table, without the columns that do not matter.

    Args:
        name: of the list, for messages.
        field: the column with the URL.
        blocks: whole lines, behind the number of the first of them.
    """

    def __init__(self, name: str, field: str, blocks: Iterable[tuple[int, bytes]]) -> None:
        self._name, self._field = name, field
        self._blocks = blocks
        self._record_bytes = 0  # of the lines since the last whole row
        self._is_chunk_due = False  # a block has ended, perhaps within a record
        csv.field_size_limit(MAX_LINE_BYTES)
        self._reader = csv.reader(self._lines())
        self._rows = self._read()
        self._names = next(filter(None, self._rows), [field])
        if field not in self._names:
            columns = ", ".join(map(repr, self._names[:20]))[:200]
            raise StorageError(f"{name} has no column {field!r} (--field); its columns: {columns}")

    def chunks(self) -> Iterator[list[Entry]]:
        """Yield the rows of each block, as it comes."""
        column = self._names.index(self._field)
        chunk: list[Entry] = []
        for row in self._rows:
            if row and row != self._names:  # Scrapy appends a table to a table, with its names
                # Many rows with a page in each would fill the memory.
                chunk.append((self._reader.line_num, row[column : column + 1]))
            if self._is_chunk_due and chunk:
                yield chunk
                chunk, self._is_chunk_due = [], False
        if chunk:
            yield chunk

    def url(self, cells: list[str]) -> str:
        """Return the URL of a row; a ValueError says that it has none."""
        if not cells:
            raise ValueError(f"it has no column {self._field!r}")
        return cells[0]

    def _read(self) -> Iterator[list[str]]:
        try:
            for row in self._reader:
                self._record_bytes = 0
                yield row
        except csv.Error as error:
            raise StorageError(f"{self._name}: line {self._reader.line_num:,}: {error}") from error

    def _lines(self) -> Iterator[str]:
        for number, block in self._blocks:
            file = io.BytesIO(block)
            for index, line in enumerate(file):
                self._record_bytes += len(line)
                if self._record_bytes > MAX_LINE_BYTES:
                    raise too_long(self._name, number + index)
                self._is_chunk_due |= file.tell() == len(block)
                yield line.decode(errors="surrogateescape")


# Behind each mark of an array, which marks may follow, and whether a value may.
_AFTER_MARK = {"[": ("]", True), ",": ("", True), "]": ("[", False)}
_AFTER_VALUE = (",]", False)
_SPACE = re.compile(r"[ \t\r\n]*")


class Array:
    """The elements of an array in JSON, or of several: Scrapy appends one to another.

    Args:
        name: of the list, for messages.
        field: the field with the URL.
        parts: the bytes of the list, as they come.
    """

    def __init__(self, name: str, field: str, parts: Iterable[bytes]) -> None:
        self._name, self._field = name, field
        self._parts = parts
        # As integers, numbers may have too many digits.
        self._value = json.JSONDecoder(parse_int=float).raw_decode
        self._line = 1
        self._marks, self._may_be_value = _AFTER_MARK["]"]

    def chunks(self) -> Iterator[list[Entry]]:
        """Yield the elements of each part, as it comes: the URL in each, or why it has none."""
        decode = codecs.getincrementaldecoder("utf-8-sig")("surrogateescape").decode
        text, enough = "", 0
        for part in chain(self._parts, [b""]):
            text += decode(part, not part)
            # What is long is not tried again with each part of it.
            if part and len(text) < enough:
                continue
            chunk, end = self._elements(text, is_all=not part)
            if chunk:
                yield chunk
            text = text[end:]
            if len(text) > MAX_LINE_BYTES:
                raise too_long(self._name, self._line)
            enough = min(2 * len(text), MAX_LINE_BYTES + 1) if len(text) > CHUNK_BYTES else 0
        if self._marks != "[":
            raise self._damaged("it ends without its ]")

    @staticmethod
    def url(element: str | ValueError) -> str:
        """Return the URL of an element; a ValueError says that it has none."""
        if isinstance(element, ValueError):
            raise element
        return element

    def _elements(self, text: str, *, is_all: bool) -> tuple[list[Entry], int]:
        """Return the elements that a text has whole, and where they end."""
        found: list[Entry] = []
        at = self._after_space(text, 0)
        while at < len(text):
            if text[at] in self._marks:
                self._marks, self._may_be_value = _AFTER_MARK[text[at]]
                at = self._after_space(text, at + 1)
                continue
            value, end = self._decoded(text, at, is_all=is_all)
            # A number may go on.
            if end is None or (end == len(text) and not is_all and isinstance(value, float)):
                break
            found.append((self._line, self._url_or_error(value)))
            self._line += text.count("\n", at, end)
            self._marks, self._may_be_value = _AFTER_VALUE
            at = self._after_space(text, end)
        return found, at

    def _decoded(self, text: str, at: int, *, is_all: bool) -> tuple[Any, int | None]:
        """Return a value and its end, which is None if that has not come yet."""
        if not self._may_be_value:
            raise self._damaged(f"Expecting one of {self._marks!r}")
        try:
            return self._value(text, at)
        except RecursionError:
            raise self._damaged("it is nested too deeply") from None
        except json.JSONDecodeError as error:
            if is_all:
                raise self._damaged(error.msg) from None
            return None, None

    def _after_space(self, text: str, at: int) -> int:
        space = _SPACE.match(text, at)
        end = space.end() if space else at
        self._line += text.count("\n", at, end)
        return end

    def _url_or_error(self, value: Any) -> str | ValueError:
        try:
            return url_in(self._field, value)
        except ValueError as error:
            return error

    def _damaged(self, why: str) -> StorageError:
        return StorageError(
            f"{self._name}: line {self._line:,}: the JSON array is damaged or cut off here: {why}; "
            "repair it, or give a list with a URL, or an object with one, on each line"
        )


def url_in(field: str, found: Any) -> str:
    """Return the URL in a JSON object; a ValueError says that it has none."""
    url = found.get(field) if isinstance(found, dict) else None
    if not isinstance(url, str):
        fields = ", ".join(map(repr, list(found)[:20])) if isinstance(found, dict) else ""
        message = f"it has no text in {field!r} (--field); its fields: {fields or 'none'}"
        raise ValueError(message[:200])  # noqa: TRY004 - of the content, not of the code
    return url
