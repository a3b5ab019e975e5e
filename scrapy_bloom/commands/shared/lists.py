"""Lists of URLs and their fingerprints."""

import re
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from scrapy_bloom.commands.shared.list_formats import Chunk, Source, opened_list
from scrapy_bloom.commands.shared.workers import can_fork, workers
from scrapy_bloom.exceptions import BloomError, StorageError

_SCHEME = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*://|data:")  # what Scrapy takes for absolute
_WHAT_IS_READ = (
    "a list has a URL on each line, or is JSON lines (.jl), a JSON array (.json) or a table (.csv) "
    "with one in the field that --field names; --format says which"
)


def begins_with_scheme(text: str) -> bool:
    """Return whether a text begins as an absolute URL does."""
    return _SCHEME.match(text) is not None


class _Result(NamedTuple):
    """URLs of a chunk, and their fingerprints."""

    urls: list[bytes]
    fingerprints: list[bytes]
    skipped: int = 0
    first_skipped: str = ""
    begins_badly: bool = False  # the first entry is no URL
    error: Exception | None = None  # that came behind all this


@dataclass
class UrlList:
    """The URLs in a list, and their fingerprints; in constant memory.

    A URL begins with a scheme and "://", or with "data:". Other lines are left out and counted; if
    the first line is one of them, this is no list of URLs. White space around a URL does not count.
    """

    path: Path | None  # None: the standard input
    fingerprint: Callable[[str], bytes]  # of a URL; a ValueError says that it is none
    form: str | None = None  # one of FORMATS; None: what the file looks like
    field: str = "url"  # which field of a JSON object, or column of a table, has the URL
    jobs: int = 1  # processes that compute fingerprints, if the list is large
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
        with opened_list(self.path, self.form, self.field) as source:
            return sum(1 for chunk in source.chunks for _ in source.entries(chunk))

    def __iter__(self) -> Generator[bytes, None, None]:
        for result in self._results():
            yield from result.fingerprints

    def batches(self) -> Generator[tuple[list[bytes], list[bytes]], None, None]:
        """Yield URLs and their fingerprints: those of each part of the list, as it comes.

        Raises StorageError if the file holds no URLs, BloomError if the fingerprinter fails.
        """
        for result in self._results(with_urls=True):
            yield result.urls, result.fingerprints

    def _results(self, *, with_urls: bool = False) -> Iterator[_Result]:
        is_first = True
        with opened_list(self.path, self.form, self.field) as source, ExitStack() as stack:
            work = partial(self._fingerprinted, source, with_urls)
            if source.is_large and self.jobs > 1 and can_fork():
                ordered_results = stack.enter_context(workers(work, self.jobs))
                results = ordered_results(source.chunks, source.file)
            else:
                results = map(work, source.chunks)
            for result in results:
                if is_first and result.begins_badly:
                    raise StorageError(f"{self.name}, {result.first_skipped}; {_WHAT_IS_READ}")
                is_first = is_first and not (result.fingerprints or result.error)
                self.skipped += result.skipped
                self.first_skipped = self.first_skipped or result.first_skipped
                yield result
                if result.error is not None:
                    raise result.error

    def _fingerprinted(self, source: Source, with_urls: bool, chunk: Chunk) -> _Result:  # noqa: FBT001
        """Find the URLs in a chunk, perhaps in a process of its own."""
        urls: list[bytes] = []
        fingerprints: list[bytes] = []
        skipped, first_skipped, begins_badly = 0, "", False
        error: Exception | None = None
        try:
            for number, entry in source.entries(chunk):
                try:
                    url = source.url(entry).strip()
                    _check_url(url)
                    fingerprint = self._fingerprint_of(url, number)
                except ValueError as why:
                    begins_badly = begins_badly or not (fingerprints or skipped)
                    skipped += 1
                    # Some of Python's messages repeat the whole URL.
                    first_skipped = first_skipped or f"line {number:,}: {str(why)[:200]}"
                else:
                    fingerprints.append(fingerprint)
                    if with_urls:
                        urls.append(url.encode())
        except (BloomError, MemoryError) as failure:
            error = failure
        return _Result(urls, fingerprints, skipped, first_skipped, begins_badly, error)

    def check_skipped(self) -> None:
        """Raise a BloomError if lines were left out, since they are not URLs."""
        if self.skipped:
            what = (
                "line is not a URL and was" if self.skipped == 1 else "lines are not URLs and were"
            )
            raise BloomError(f"{self.skipped:,} {what} left out; the first: {self.first_skipped}")

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


def _check_url(url: str) -> None:
    if not begins_with_scheme(url):
        shown = repr(url[:60]) if url.isprintable() else "binary data"
        raise ValueError(f"Missing scheme, such as https://, in {shown}")
    if "\n" in url or "\r" in url:
        raise ValueError("there is a line break in it")
    url.encode()  # half a character, from JSON, is a ValueError
