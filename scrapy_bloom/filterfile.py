"""One filter in one file, mapped into memory: the header, then the blocks."""

import contextlib
import errno
import mmap
import os
import sys
from collections.abc import Callable
from pathlib import Path

from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.filters import BloomFilter
from scrapy_bloom.header import HEADER_BYTES, STATE_WORD, Header, State, pack_state, read_header

_ZEROS = bytes(1 << 20)


class FilterFile:
    """A filter file, mapped for reading and writing. Made by `create` or `open`."""

    def __init__(self, path: Path, header: Header, state: State) -> None:
        self.path = path
        self.header = header
        self.state = state
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._map = mmap.mmap(self._fd, HEADER_BYTES + header.geometry.nbytes)
        except BaseException:
            os.close(self._fd)
            raise
        self._view = memoryview(self._map)
        self._words = self._view[:HEADER_BYTES].cast("Q")
        self.filter = BloomFilter.over(
            self._view[HEADER_BYTES:],
            header.geometry,
            capacity=header.capacity,
            error_rate=header.error_rate,
            salt=header.salt,
        )

    @classmethod
    def open(cls, path: Path) -> "FilterFile":
        """Map an existing file; takes no longer for a big one.

        Raises:
            FilterFileError: the file is truncated, foreign, damaged or of a newer format.
            StorageError: it cannot be read or written.
        """
        header, state = read_header(path)
        try:
            return cls(path, header, state)
        except OSError as error:
            raise StorageError(
                f"{path} cannot be opened for writing: {error.strerror or error}; the crawl has to "
                "be able to write to it"
            ) from error

    @classmethod
    def create(
        cls, path: Path, header: Header, fill: Callable[[BloomFilter], int] | None = None
    ) -> "FilterFile":
        """Make a new file with all its space reserved; it appears whole or not at all.

        Args:
            path: where; nothing may be there yet.
            header: what to write into it.
            fill: adds what the filter shall hold from the start, and returns how many it was.

        Raises:
            StorageError: no space or no right to write; what was begun is removed.
        """
        if path.exists():
            raise StorageError(f"{path} exists already; it is not replaced")
        draft = path.with_name(path.name + ".tmp")
        size = HEADER_BYTES + header.geometry.nbytes
        try:
            try:
                _reserve(draft, size)
                _write_header(draft, header)
                file = cls(draft, header, State(0, in_use=False))
                try:
                    count = fill(file.filter) if fill else 0
                    file.save_state(count, in_use=False)
                    file.sync()
                    draft.rename(path)
                except BaseException:
                    file.close()
                    raise
            except BaseException:
                with contextlib.suppress(OSError):
                    draft.unlink()
                raise
        except OSError as error:
            raise StorageError(_no_room(path, size, error)) from error
        file.path = path
        _sync_directory(path.parent)
        return file

    def save_state(self, count: int, *, in_use: bool) -> None:
        """Write the count and the in-use flag into the mapping, in one store."""
        self.state = State(count, in_use)
        self._words[STATE_WORD] = pack_state(self.state)

    def sync(self) -> None:
        """Write everything changed so far to the disk. May run in another thread.

        Raises:
            OSError: the disk failed.
        """
        # fsync, not mmap.flush: it lets other threads run meanwhile, and Linux and the BSDs
        # write the pages of a shared mapping with it. Elsewhere flush() is the documented way.
        if not sys.platform.startswith(("linux", "freebsd")):
            self._map.flush()
        os.fsync(self._fd)

    def close(self) -> None:
        """Unmap the file, as it is; the filter can't be used any more."""
        self.filter.release()
        self._words.release()
        self._view.release()
        self._map.close()
        os.close(self._fd)


def _reserve(path: Path, size: int) -> None:
    """Make a file of zeros whose every byte has its place on the disk.

    A hole in the file would be found out on a full disk only when a bit is set in it, and then
    the kernel ends the process with SIGBUS.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        if hasattr(os, "posix_fallocate"):
            try:
                os.posix_fallocate(fd, 0, size)
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
                    raise
            else:
                return
        rest = size
        while rest:
            rest -= os.write(fd, _ZEROS[: min(rest, len(_ZEROS))])
    finally:
        os.close(fd)


def _write_header(path: Path, header: Header) -> None:
    reserved, state = (
        pack_state(State(0, in_use=False)).to_bytes(8, sys.byteorder) for _ in range(2)
    )
    with path.open("r+b") as file:
        file.write(header.pack() + reserved + state)


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _no_room(path: Path, size: int, error: OSError) -> str:
    text = f"{path} cannot be created: {error.strerror or error}"
    if error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
        text += (
            f"; the filter takes {size:,} bytes: make room, set BLOOM_DIR to a larger disk, or "
            "lower BLOOM_EXPECTED_REQUESTS"
        )
    return text
