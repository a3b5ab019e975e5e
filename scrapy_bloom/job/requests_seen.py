"""Read the fingerprints that Scrapy's own filter recorded in a requests.seen file."""

import logging
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import BinaryIO

from scrapy_bloom.exceptions import SeenFileError, StorageError
from scrapy_bloom.job.disk import opened
from scrapy_bloom.text import counted

logger = logging.getLogger(__name__)

_LENGTH_BYTES = 2
_PROGRESS_SECS = 5
_MAX_FINGERPRINT_BYTES = 255
_MAX_LINE_BYTES = 2 * _MAX_FINGERPRINT_BYTES + 3  # with "\r\n", and one more than allowed
_HEX_DIGITS = frozenset(b"0123456789abcdefABCDEF")


class SeenFile:
    """The fingerprints in a requests.seen file, in either format of Scrapy.

    Since Scrapy 2.19 the file is binary: the length of each fingerprint (2 bytes, big-endian)
    precedes it. Before, the file was text: one fingerprint per line, in hexadecimal digits.
    Iterating yields each fingerprint as bytes, in constant memory, or raises SeenFileError for any
    other format.

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
                first = file.read(1)
        except OSError as error:
            raise StorageError(f"{path} cannot be read: {error.strerror or error}") from error
        # A length below 256 begins with a zero byte, which is not a digit: no file fits both.
        self.is_text = first not in {b"", b"\0"}

    def __iter__(self) -> Generator[bytes, None, None]:
        self.position, self.is_truncated = 0, False
        with opened(self.path) as file:
            yield from self._text_records(file) if self.is_text else self._binary_records(file)
        self.position = self.size

    def count(self) -> int:
        """Count the fingerprints; this reads the whole file."""
        return sum(1 for _ in self)

    def _binary_records(self, file: BinaryIO) -> Iterator[bytes]:
        while head := file.read(_LENGTH_BYTES):
            length = int.from_bytes(head, "big")
            if len(head) == _LENGTH_BYTES and not 0 < length <= _MAX_FINGERPRINT_BYTES:
                raise self._neither()
            fingerprint = file.read(length)
            if len(head) < _LENGTH_BYTES or len(fingerprint) < length:
                self.is_truncated = True
                return
            self.position += _LENGTH_BYTES + length
            yield fingerprint

    def _text_records(self, file: BinaryIO) -> Iterator[bytes]:
        last = 0
        while line := file.readline(_MAX_LINE_BYTES):
            digits = line.removesuffix(b"\n").removesuffix(b"\r")
            if len(line) == _MAX_LINE_BYTES or not digits or not _HEX_DIGITS.issuperset(digits):
                raise self._neither()
            if not line.endswith(b"\n") and len(digits) != last:
                self.is_truncated = True
                return
            if len(digits) % 2:
                raise self._neither()
            yield bytes.fromhex(digits.decode("ascii"))
            self.position += len(line)
            last = len(digits)

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
