"""One filter in one file, mapped into memory: the header, then the blocks."""

import contextlib
import errno
import mmap
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.files.header import HEADER_BYTES, FileGeneration, pack_header, write_state
from scrapy_bloom.files.local import LocalGeneration
from scrapy_bloom.filters.bloom import BloomFilter
from scrapy_bloom.job.disk import create, sync_directory

_ZEROS = bytes(1 << 20)


class FilterFile(FileGeneration, LocalGeneration):
    """A generation whose file is mapped. Made by `create` or `open`."""

    def __init__(self, found: FileGeneration, *, readonly: bool = False) -> None:
        super().__init__(**vars(found))
        access, mode = mmap.ACCESS_WRITE, "r+b"
        if readonly:
            access, mode = mmap.ACCESS_READ, "rb"
        self._file = found.path.open(mode, buffering=0)
        try:
            size = HEADER_BYTES + found.geometry.nbytes
            self._map = mmap.mmap(self._file.fileno(), size, access=access)
        except BaseException:
            self._file.close()
            raise
        self._view = memoryview(self._map)
        self._words = self._view[:HEADER_BYTES].cast("Q")
        self.filter = BloomFilter.over(
            self._view[HEADER_BYTES:],
            found.geometry,
            capacity=found.capacity,
            error_rate=found.error_rate,
            salt=found.salt,
        )

    @classmethod
    def open(cls, path: Path, *, readonly: bool = False) -> "FilterFile":
        """Map an existing file, which takes no longer for a big one.

        Read only, that may be while a crawl writes to it. Raises as `FileGeneration.at`; also a
        StorageError if the file cannot be written.
        """
        found = FileGeneration.at(path)
        try:
            return cls(found, readonly=readonly)
        except OSError as error:
            why = error.strerror or error
            if readonly:
                raise StorageError(f"{path} cannot be read: {why}") from error
            raise StorageError(
                f"{path} cannot be opened for writing: {why}; the crawl has to be able to write "
                "to it"
            ) from error

    @classmethod
    def create(
        cls, new: FileGeneration, fill: Callable[[BloomFilter], int] | None = None
    ) -> "FilterFile":
        """Make a new file with all its space reserved. It appears whole or not at all.

        Args:
            new: what to write into its header, and where; nothing may be there yet.
            fill: adds what the filter shall hold from the start, and returns how many it was.

        Raises:
            StorageError: no space or no right to write; what was begun is removed.
        """
        path = new.path
        if path.exists():
            raise StorageError(f"{path} exists already; it is not replaced")
        begun = draft = path.with_name(path.name + ".tmp")
        size = HEADER_BYTES + new.geometry.nbytes
        try:
            _reserve(draft, size)
            with draft.open("r+b") as opened:
                opened.write(pack_header(new))
            with contextlib.closing(cls(replace(new, path=draft))) as file:
                file.count = fill(file.filter) if fill else 0
                file.save()
                file.sync()
            begun = draft.rename(path)  # closed, since Windows renames no file that is open
            created = cls.open(path)
        except BaseException as error:
            with contextlib.suppress(OSError):
                begun.unlink()
            if isinstance(error, OSError):
                raise StorageError(_no_room(path, size, error)) from error
            raise
        sync_directory(path.parent)
        return created

    def save(self) -> None:
        """Write what has changed into the header; it survives a kill at any instant."""
        write_state(self._words, self, self.count - self.unapplied)

    def sync(self) -> None:
        """Write all changes so far to the disk; in any thread; raises OSError."""
        # fsync, not mmap.flush: it lets other threads run meanwhile, and Linux and the BSDs
        # write the pages of a shared mapping with it. Elsewhere flush() is the documented way.
        if not sys.platform.startswith(("linux", "freebsd")):
            self._map.flush()
        os.fsync(self._file.fileno())

    def sync_header(self) -> None:
        """Write the header alone to the disk, however large the filter is; raises OSError."""
        # With a descriptor of its own: what fails to be written is reported to each descriptor
        # once, and a checkpoint has to learn of it, too.
        with (
            self.path.open("r+b", buffering=0) as file,
            mmap.mmap(file.fileno(), HEADER_BYTES) as header,
        ):
            header.flush()
            if sys.platform == "win32":  # there, that leaves the disk's own cache
                os.fsync(file.fileno())

    def is_in_place(self) -> bool:
        """Return whether the path still leads to this file: it may have been replaced."""
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), self.path.stat())
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:  # no right to look, for example: nothing is known to be wrong
            return error.errno != errno.ESTALE

    def close(self) -> None:
        """Unmap the file, as it is."""
        self.is_closed = True
        self.filter.release()
        self._words.release()
        self._view.release()
        # After an interrupt, a function in the traceback may still have some of the bits in hand:
        # they are unmapped with the last of these.
        with contextlib.suppress(BufferError):
            self._map.close()
        self._file.close()


def _reserve(path: Path, size: int) -> None:
    """Make a file of zeros whose every byte has its place on the disk.

    A file with holes would be found out on a full disk only when a bit is set in a hole. Then the
    kernel ends the process with SIGBUS.
    """
    with create(path, buffering=0) as file:
        if hasattr(os, "posix_fallocate"):
            try:
                os.posix_fallocate(file.fileno(), 0, size)
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
                    raise
            else:
                return
        rest = size
        while rest:
            rest -= file.write(_ZEROS[: min(rest, len(_ZEROS))])


def _no_room(path: Path, size: int, error: OSError) -> str:
    text = f"{path} cannot be created: {error.strerror or error}"
    if error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
        text += (
            f"; the filter takes {size:,} bytes: make room, set BLOOM_DIR to a larger disk, or "
            "lower BLOOM_EXPECTED_REQUESTS"
        )
    return text
