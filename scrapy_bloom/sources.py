"""What a filter can be filled from, beside requests.seen: a list of URLs, a set in Redis."""

import codecs
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from scrapy_bloom.exceptions import BloomError, StorageError
from scrapy_bloom.redis_server import RedisServer

_CHUNK_BYTES = 1 << 20
_SCAN_COUNT = 1000  # members asked for at once


class UrlList:
    """The URLs in a text file, one a line, and their fingerprints; in constant memory.

    White space around a URL does not count, and empty lines are left out. So is a line that is no
    URL; it is counted.

    Args:
        path: the file; None: the standard input.
        fingerprint: of a URL; a ValueError says that it is none.

    Attributes:
        skipped: lines so far that were no URL.
        first_skipped: the first of them, for people: its number, and why.
    """

    def __init__(self, path: Path | None, fingerprint: Callable[[str], bytes]) -> None:
        self.skipped = 0
        self.first_skipped = ""
        self._path = path
        self._fingerprint = fingerprint

    @property
    def name(self) -> str:
        """Where it is, for people."""
        return str(self._path or "the standard input")

    def count(self) -> int | None:
        """How many lines there are, None if nobody knows before; reads all of the file.

        Raises:
            StorageError: it cannot be read.
        """
        if self._path is None or (self._path.exists() and not self._path.is_file()):
            return None  # a pipe can be read once only
        with self._opened(self._path) as file:
            chunk, lines = b"\n", 0
            while more := file.read(_CHUNK_BYTES):
                chunk = more
                lines += chunk.count(b"\n")
            return lines + (not chunk.endswith(b"\n"))

    def __iter__(self) -> Iterator[bytes]:
        return (fingerprint for _, fingerprint in self.pairs())

    def pairs(self) -> Iterator[tuple[bytes, bytes]]:
        """Each URL, as it is in the file, and its fingerprint.

        Raises:
            StorageError: the file cannot be read.
            BloomError: the fingerprinter fails.
        """
        if self._path is None:
            yield from self._pairs(sys.stdin.buffer)
        else:
            with self._opened(self._path) as file:
                yield from self._pairs(file)

    def _pairs(self, file: BinaryIO) -> Iterator[tuple[bytes, bytes]]:
        for number, line in enumerate(file, 1):
            raw = line.removeprefix(codecs.BOM_UTF8).strip() if number == 1 else line.strip()
            if not raw:
                continue
            try:
                fingerprint = self._fingerprint(raw.decode())
            except ValueError as error:
                self.skipped += 1
                if self.skipped == 1:
                    self.first_skipped = f"line {number:,}: {str(error)[:200]}"
                continue
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
            yield raw, fingerprint

    @staticmethod
    def _opened(path: Path) -> BinaryIO:
        try:
            return path.open("rb")
        except OSError as error:
            raise StorageError(f"{path} cannot be read: {error.strerror or error}") from error


class RedisSet:
    """The fingerprints in a set in Redis, as scrapy-redis keeps them: in hexadecimal digits.

    Args:
        server: the connection.
        key: the name of the set.
    """

    def __init__(self, server: RedisServer, key: str) -> None:
        self._server = server
        self._key = key

    @property
    def name(self) -> str:
        """Where it is, for people."""
        return f"{self._server.address}, key {self._key}"

    def count(self) -> int:
        """How many members it has.

        Raises:
            StorageError: there is no such set, or the server failed.
        """
        kind = self._server.call(lambda client: client.type(self._key))
        if kind == b"none":
            raise StorageError(
                f"{self._server.address} has no key {self._key!r}; give the name of scrapy-redis's "
                "set with --source-key (its SCHEDULER_DUPEFILTER_KEY, by default "
                "<spider>:dupefilter)"
            )
        if kind != b"set":
            raise StorageError(
                f"the key {self._key!r} of {self._server.address} is a {kind.decode()}, not a set "
                "of fingerprints"
            )
        return int(self._server.call(lambda client: client.scard(self._key)))

    def __iter__(self) -> Iterator[bytes]:
        """Each fingerprint at least once, also while others are added.

        Raises:
            StorageError: a member is no fingerprint, or the server failed.
        """
        cursor = 0
        while True:
            cursor, members = self._scan(cursor)
            for member in members:
                try:
                    yield bytes.fromhex(member.decode())
                except ValueError:
                    raise StorageError(
                        f"the set {self._key!r} of {self._server.address} holds {member[:60]!r}, "
                        "which is no fingerprint in hexadecimal digits; it was left as it is"
                    ) from None
            if cursor == 0:
                return

    def _scan(self, cursor: int) -> tuple[int, list[bytes]]:
        def ask(client: Any) -> tuple[int, list[bytes]]:
            answer: tuple[int, list[bytes]] = client.sscan(self._key, cursor, count=_SCAN_COUNT)
            return answer

        return self._server.call(ask)
