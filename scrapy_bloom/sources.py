"""What a filter can be filled from, beside requests.seen: a list of URLs, a set in Redis."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scrapy_bloom.exceptions import BloomError, StorageError
from scrapy_bloom.lists import UNREADABLE, Entries, format_of, opened, read_list, reason
from scrapy_bloom.redis_server import RedisServer

_SCHEME = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*://")
_WHAT_IS_READ = (
    "a list has a URL on each line, or is JSON lines (.jl) or a table (.csv) with one in the field "
    "that --field names; --format says which"
)
_SCAN_COUNT = 1000  # members asked for at once


class UrlList:
    """The URLs in a list, and their fingerprints; in constant memory.

    What is no URL, as it does not begin with a scheme and "://", is left out and counted; if
    nothing comes before it, there is no list of URLs. White space around a URL does not count.

    Args:
        path: the file; None: the standard input.
        fingerprint: of a URL; a ValueError says that it is none.
        form: one of `lists.FORMATS`; None: what the file looks like.
        field: see `lists.read_list`.

    Attributes:
        skipped: lines so far that were no URL.
        first_skipped: the first of them, for people: its number, and why.
    """

    def __init__(
        self,
        path: Path | None,
        fingerprint: Callable[[str], bytes],
        *,
        form: str | None = None,
        field: str = "url",
    ) -> None:
        self.skipped = 0
        self.first_skipped = ""
        self._path = path
        self._fingerprint = fingerprint
        self._form = form
        self._field = field

    @property
    def name(self) -> str:
        """The place of it, for people."""
        return str(self._path or "the standard input")

    def count(self) -> int | None:
        """Count the lines or records, which reads all of the file; None if nobody knows before.

        Raises:
            StorageError: it cannot be read.
        """
        if self._path is None or (self._path.exists() and not self._path.is_file()):
            return None  # a pipe can be read once only
        with self._read() as found:
            return sum(1 for _ in found.entries)

    def __iter__(self) -> Iterator[bytes]:
        return (fingerprint for _, fingerprint in self.pairs())

    def pairs(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield each URL and its fingerprint.

        Raises:
            StorageError: the file cannot be read, or holds no URLs.
            BloomError: the fingerprinter fails.
        """
        is_first = True
        with self._read() as found:
            for number, entry in found.entries:
                try:
                    url = found.url(entry).strip()
                    _check_scheme(url)
                    pair = url.encode(), self._fingerprinted(url, number)
                except ValueError as error:
                    told = f"line {number:,}: {error}"
                    if is_first:
                        raise StorageError(f"{self.name}, {told}; {_WHAT_IS_READ}") from None
                    self.skipped += 1
                    self.first_skipped = self.first_skipped or told
                else:
                    yield pair
                is_first = False

    @contextmanager
    def _read(self) -> Iterator[Entries]:
        try:
            with opened(self._path) as file:
                form = self._form or format_of(self._path, file)
                yield read_list(file, form, self._field, self.name)
        except UNREADABLE as error:
            raise StorageError(f"{self.name} cannot be read: {reason(error)}") from error

    def _fingerprinted(self, url: str, number: int) -> bytes:
        try:
            fingerprint = self._fingerprint(url)
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


def begins_with_scheme(text: str) -> bool:
    """Return whether a text may be a URL: no relative one, and nothing else."""
    return _SCHEME.match(text) is not None


def _check_scheme(url: str) -> None:
    if not begins_with_scheme(url):
        shown = repr(url[:60]) if url.isprintable() else "binary data"
        raise ValueError(f"Missing scheme, such as https://, in {shown}")
    if "\n" in url or "\r" in url:
        raise ValueError("there is a line break in it")


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
        """The place of it, for people."""
        return f"{self._server.address}, key {self._key}"

    def count(self) -> int:
        """Count its members.

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
        """Yield each fingerprint at least once, also while others are added.

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
