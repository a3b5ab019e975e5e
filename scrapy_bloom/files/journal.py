"""Journal of what a crawl has recorded since its queue was last written to the disk.

The kernel writes a mapped file to the disk whenever it likes. So after a power cut the filter may
be newer than the queue, whatever is synced first, and requests that are nowhere look seen. To avoid
that, fingerprints stay here until the queue that holds their requests is on the disk. After a kill
these files are read back. After a power cut they are thrown away: their requests are crawled again.
"""

import contextlib
import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.generations.lookup import Lookup
from scrapy_bloom.job.disk import create
from scrapy_bloom.job.paths import check_file

_NAMES = ("journal-1", "journal-2")
_LENGTH_BYTES = 4
_LONG = 50_000  # fingerprints, some 5 MB of memory: it is settled sooner then
_MOST_BYTES = 32 << 20  # of a file: that many twenty times over


class Journal:
    """The fingerprints that are recorded, but not yet in the filter's file.

    It has two files in the filter's directory: one is written to while the fingerprints of the
    other are moved into the filter. Raises OSError if they cannot be made.
    """

    def __init__(self, directory: Path, sync_queue: Callable[[], None]) -> None:
        self._sync_queue = sync_queue
        self._known: Lookup
        self._record: Callable[[bytes], object]
        self.when_long: Callable[[], None] = lambda: None  # called when to settle soon
        self.when_full: Callable[[OSError], None] = lambda _: None  # what could not be written
        # A fingerprint goes from `_new` to `_settling` to the filter, and is looked for in that
        # order: so it is found while another thread settles.
        self._new: set[bytes] = set()
        self._settling: set[bytes] = set()
        self._add_lock = threading.Lock()
        self._settle_lock = threading.Lock()
        self._directory = directory
        self._file, self._other_file = (create(path, buffering=0) for path in _paths(directory))

    def stand_before(self, known: Lookup, record: Callable[[bytes], object]) -> None:
        """Settle by `record` from now on, into a filter that has recorded what is `known`."""
        self._known, self._record = known, record

    def __contains__(self, fingerprint: bytes) -> bool:
        return (
            fingerprint in self._new or fingerprint in self._settling or fingerprint in self._known
        )

    def add(self, fingerprint: bytes) -> bool:
        """Record a fingerprint; True if it was new. See `keep`."""
        if fingerprint in self:
            return False
        self.keep(fingerprint)
        return True

    def keep(self, fingerprint: bytes) -> None:
        """Record a fingerprint, also one that an older generation has.

        If the disk is full, it is recorded in memory only, and forgotten if the process dies soon.
        """
        record = len(fingerprint).to_bytes(_LENGTH_BYTES, "big") + fingerprint
        with self._add_lock:
            self._new.add(fingerprint)
            try:
                self._append(record)
            except OSError as error:
                self.when_full(error)
        if len(self._new) >= _LONG:
            self.when_long()

    def _append(self, record: bytes) -> None:
        if (written := self._file.write(record)) < len(record):
            self._file.truncate(self._file.tell() - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def settle(self) -> None:
        """Write the queue to the disk, then move what was recorded until now into the filter.

        May run in any thread, beside `add`. Raises OSError: what was not moved is kept here.
        """
        with self._settle_lock:
            self._move_settling()  # left if the disk failed the last time
            with self._add_lock:
                self._settling = self._new  # first: it is read beside this
                self._new = set()
                self._file, self._other_file = self._other_file, self._file
            self._move_settling()

    def _move_settling(self) -> None:
        if self._settling:
            self._sync_queue()
            for fingerprint in self._settling:
                self._record(fingerprint)
            self._settling = set()
            self._other_file.truncate(0)

    def close(self, *, settled: bool) -> None:
        """Close the files, and remove them if all that they hold is settled."""
        self._file.close()
        self._other_file.close()
        if settled:
            with contextlib.suppress(OSError):  # the next run tries again: they are empty
                remove_journal(self._directory)


def read_journal(directory: Path) -> list[bytes] | None:
    """Return what a killed crawl had recorded; None if it kept no journal.

    Raises OSError, or a StorageError: the file can be no journal.
    """
    paths = [path for path in _paths(directory) if path.exists()]
    fingerprints: list[bytes] = []
    for path in paths:
        check_file(path)
        if path.stat().st_size > _MOST_BYTES:
            raise StorageError(
                f"{path} is no journal of scrapy_bloom, which is never that large; it was left as "
                "it is: move it away to go on without (what it holds is crawled again)"
            )
        data = path.read_bytes()
        start = 0
        while (begin := start + _LENGTH_BYTES) <= len(data):
            start = begin + int.from_bytes(data[start:begin], "big")
            if start > len(data):
                break  # it was being written at that moment
            fingerprints.append(data[begin:start])
    return fingerprints if paths else None


def remove_journal(directory: Path) -> None:
    """Remove the files of a journal."""
    for path in _paths(directory):
        path.unlink(missing_ok=True)


def _paths(directory: Path) -> list[Path]:
    return [directory / name for name in _NAMES]
