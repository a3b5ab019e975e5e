"""Overwrite mapped files on file systems that do not overwrite in place, such as btrfs.

They need new space for each block, also if the file has all of its own. On a full disk, the kernel
ends a process that changes a mapped block with SIGBUS, before it can log a line.
"""

import contextlib
import ctypes
import functools
import os
import shutil
import struct
import sys
from pathlib import Path
from typing import IO

from scrapy_bloom.exceptions import RefusedError
from scrapy_bloom.job.disk import FULL, create, log_and_index
from scrapy_bloom.text import size_text

_KINDS = ("btrfs", "xfs", "zfs", "bcachefs", "f2fs", "overlay")  # xfs: after `cp --reflink`
_MARGIN_BYTES = 16 << 20  # for figures and indexes, and for what others write meanwhile
_NO_COPY_ON_WRITE = 0x00800000  # FS_NOCOW_FL
_UNSHARE = 0x40  # FALLOC_FL_UNSHARE_RANGE


def overwrite_in_place(file: IO[bytes]) -> None:
    """Let btrfs overwrite an empty file in place, which needs no new space on a full disk."""
    if sys.platform != "linux":
        return
    import fcntl  # noqa: PLC0415 - Windows has none

    number = (struct.calcsize("l") << 16) | 0x6601  # of FS_IOC_GETFLAGS and, plus 1, SETFLAGS
    with contextlib.suppress(OSError):  # other file systems lack the attribute
        found = fcntl.ioctl(file.fileno(), 2 << 30 | number, bytes(struct.calcsize("l")))
        flags = struct.unpack("l", found)[0] | _NO_COPY_ON_WRITE
        fcntl.ioctl(file.fileno(), 1 << 30 | number + 1, struct.pack("l", flags))


def reserve(file: IO[bytes], size: int) -> None:
    """Reserve space to overwrite a file that shares its blocks with a copy (`cp --reflink`).

    Raises an OSError if the disk is full.
    """
    if sys.platform != "linux" or sys.maxsize < 2**32:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    values = (file.fileno(), _UNSHARE, ctypes.c_long(0), ctypes.c_long(size))
    if libc.fallocate(*values) and (number := ctypes.get_errno()) in FULL:
        raise OSError(number, os.strerror(number))


def check_room(directory: Path, nbytes: int = 0) -> None:
    """Raise a RefusedError if there may be no room to overwrite parts of a mapped file.

    Args:
        directory: of the file.
        nbytes: how much of the file is overwritten, at most.
    """
    if sys.platform == "win32":
        return
    nbytes += _MARGIN_BYTES
    try:
        found = os.statvfs(directory)
    except (AttributeError, FileNotFoundError):  # not on Unix; or the open file was removed
        return
    left, kind = found.f_bavail * found.f_frsize, _file_system(directory)
    if left < nbytes and kind in _KINDS:
        raise RefusedError(
            f"{directory} has {size_text(left)} left on its disk ({kind}), which needs new space "
            f"to overwrite a file; free some space, at least {size_text(nbytes)}"
        )


@functools.cache
def _file_system(directory: Path) -> str:
    """Return the name of the kind of file system of a directory, or an empty text."""
    real, found = Path(os.path.realpath(directory)), ("", "")
    with contextlib.suppress(OSError, UnicodeError):  # not on Linux
        for line in Path("/proc/self/mounts").read_text("utf-8").splitlines():
            _, point, kind, *_ = line.split()
            if len(point) >= len(found[0]) and real.is_relative_to(point.replace("\\040", " ")):
                found = point, kind
    return found[1]


def make_index(database: Path) -> None:
    """Make the index of the write-ahead log on btrfs, because SQLite maps and overwrites it."""
    index = log_and_index(database)[1]
    if sys.platform == "win32":
        return
    if _file_system(database.parent) != "btrfs" or index.exists():
        return
    with create(index) as file:
        overwrite_in_place(file)
        if database.exists():
            shutil.copymode(database, index)
            with contextlib.suppress(OSError):  # as SQLite does
                os.fchown(file.fileno(), database.stat().st_uid, database.stat().st_gid)
