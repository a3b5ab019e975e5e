"""Read the fingerprints that Scrapy's own filter recorded in a requests.seen file."""

import logging
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import BinaryIO

from scrapy_bloom.exceptions import SeenFileError, StorageError
from scrapy_bloom.job.disk import opened
from scrapy_bloom.text import counted

logger = logging.getLogger(__name__)

_PROGRESS_SECS = 5
_MAX_LINE_BYTES = 2 * 255 + 2  # with "\r\n"
_HEX_DIGITS = frozenset(b"0123456789abcdefABCDEF")


class SeenFile:
    """The fingerprints in a requests.seen file, in both formats of Scrapy.

    Since Scrapy 2.19 the file is binary: the length of each fingerprint (2 bytes, big-endian)
    precedes it. Before, the file was text: one fingerprint per line, in hexadecimal digits. A file
    has both if Scrapy was upgraded between two runs of a job: a length below 256 begins with a zero
    byte, which is no digit. Iterating yields each fingerprint as bytes, in constant memory, or
    raises SeenFileError for any other format.

    Attributes:
        position: how many bytes the iteration has read.
        is_truncated: whether the last record is incomplete; a killed process leaves such a file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.position = 0
        self.is_truncated = False
        try:
            self.size = path.stat().st_size
            with opened(path) as file:
                file.read(1)
        except OSError as error:
            raise StorageError(f"{path} cannot be read: {error.strerror or error}") from error

    def __iter__(self) -> Generator[bytes, None, None]:
        self.position, self.is_truncated, digits = 0, False, 0
        with opened(self.path) as file:
            while first := file.read(1):
                if first == b"\0":
                    fingerprint = self._binary(file)
                else:
                    fingerprint = self._text(first + file.readline(_MAX_LINE_BYTES), digits)
                    digits = 2 * len(fingerprint)
                if not fingerprint:
                    self.is_truncated = True
                    break
                self.position = file.tell()
                yield fingerprint
        self.position = self.size

    def count(self) -> int:
        """Count the fingerprints; this reads the whole file."""
        return sum(1 for _ in self)

    def _binary(self, file: BinaryIO) -> bytes:
        """Return the rest of a record; empty: it is incomplete."""
        length = file.read(1)
        if length == b"\0":
            raise self._neither()
        fingerprint = file.read(length[0]) if length else b""
        return fingerprint if length and len(fingerprint) == length[0] else b""

    def _text(self, line: bytes, last: int) -> bytes:
        """Return the fingerprint in a line, which is complete if it is as long as the `last`."""
        digits = line.removesuffix(b"\n").removesuffix(b"\r")
        if len(line) > _MAX_LINE_BYTES or not digits or not _HEX_DIGITS.issuperset(digits):
            raise self._neither()
        if not line.endswith(b"\n") and len(digits) != last:
            return b""
        if len(digits) % 2:
            raise self._neither()
        return bytes.fromhex(digits.decode("ascii"))

    def _neither(self) -> SeenFileError:
        return SeenFileError(
            f"{self.path} is in neither format of Scrapy's requests.seen (at byte "
            f"{self.position:,}); it was left as it is: move it away to start with an empty "
            "filter, or restore it from a backup"
        )


def import_seen(seen: SeenFile, add: Callable[[bytes], bool]) -> int:
    """Add a requests.seen file to a filter and log the progress; return how many were new."""
    logger.info("Importing the requests that Scrapy recorded in %s", seen.path)
    added = read = 0
    begun = last = time.monotonic()
    for fingerprint in seen:
        added += add(fingerprint)
        read += 1
        if read % 10_000 == 0 and (now := time.monotonic()) - last >= _PROGRESS_SECS:
            last = now
            logger.info(
                "Importing %s: %.0f %%, %s, %s per second",
                seen.path,
                100 * seen.position / seen.size,
                counted(read, "request"),
                f"{read / (now - begun):,.0f}",
            )
    imported = counted(read, "request")
    logger.info("Imported %s from %s; the file was left as it is", imported, seen.path)
    if seen.is_truncated:
        logger.warning(
            "Ignored an incomplete request at the end of %s: the crawl that wrote it was not "
            "closed cleanly, so requests that were queued may be recorded but never crawled",
            seen.path,
        )
    return added
