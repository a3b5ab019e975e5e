"""Lock a job directory, or the directory of a filter, so that only one crawl uses it at a time."""

import errno
import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from scrapy_bloom.exceptions import LockedError, StorageError

if TYPE_CHECKING:
    from filelock import FileLock


LOCK_NAME = "lock"  # in the directory of a filter


def lock_directory(directory: Path, settings: str = "JOBDIR or BLOOM_DIR") -> "FileLock":
    """Lock the directory of a filter for one crawl, without waiting.

    Args:
        directory: the function creates it if it is missing.
        settings: names of the settings that choose another directory, for the error messages.

    Raises:
        LockedError: another crawl holds the lock.
        StorageError: the directory is not writable, or its file system has no locks.
    """
    from filelock import Timeout  # noqa: PLC0415 - half a MB, which only crawls with files need

    try:
        directory.mkdir(parents=True, exist_ok=True)
        if not os.access(directory, os.W_OK):
            # Its files may still be writable, but a later attempt to rename one would fail.
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        lock = _hard_lock(directory / LOCK_NAME)
        lock.acquire()
    except Timeout:
        raise LockedError(
            f"{directory} is in use by another running crawl; wait for it to end, or give this one "
            f"another {settings}"
        ) from None
    except (FileExistsError, NotADirectoryError) as error:
        file = next((each for each in (directory, *directory.parents) if each.is_file()), directory)
        raise StorageError(
            f"{file} is a file, and {directory} has to be a directory; give the crawl another "
            f"{settings}"
        ) from error
    except (OSError, NotImplementedError) as error:  # filelock raises the latter for ENOSYS
        if isinstance(error, NotImplementedError) or error.errno == errno.ENOSYS:
            raise StorageError(
                f"{directory} is on a file system without locks (flock), where two crawls could "
                f"damage each other's files; give the crawl another {settings}"
            ) from error
        raise StorageError(
            f"{directory} cannot be written to: {error.strerror or error}; give the crawl the "
            f"right to write there, or another {settings}"
        ) from error
    return lock


def holders(path: Path) -> list[int] | None:
    """Return the ids of the processes on this machine that hold a lock; None if unknown.

    Trying the lock, even for an instant, could turn away a crawl that starts at that moment, so the
    function reads Linux's list of locks. The file need not exist. A process that this one cannot
    see, for example in another container, has the id 0.
    """
    if sys.platform == "win32":
        return None
    try:
        lines = Path("/proc/locks").read_text("ascii").splitlines()
        file = path.stat()
    except FileNotFoundError:
        return [] if Path("/proc/locks").exists() else None
    except OSError:
        return None
    inode = f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}:{file.st_ino}"
    locks = [line.split() for line in lines if "FLOCK" in line and f":{file.st_ino} " in line]
    if found := [fields for fields in locks if inode in fields]:
        return [max(0, int(fields[fields.index(inode) - 1])) for fields in found]
    return None if locks else []  # some file systems list another device number


def _hard_lock(path: Path) -> "FileLock":
    """Return a lock, not acquired yet, that the system releases when the process ends."""
    from filelock import FileLock  # noqa: PLC0415 - half a MB, which only crawls with files need

    # thread_local: another thread may close the crawl. mode: anybody who can open it can lock it.
    new = partial(FileLock, path, timeout=0, mode=0o600, thread_local=False)
    try:
        # A soft lock is only a file, which a killed crawl never removes.
        return new(fallback_to_soft=False)
    except TypeError:  # an older filelock, which has no soft fallback
        return new()


def lock_job(job_dir: Path) -> "FileLock":
    """Lock a job directory for one crawl, without waiting, wherever its filter is kept.

    Raises:
        LockedError: another crawl holds the lock.
        StorageError: the directory cannot be locked.
    """
    # In the filter's directory, so that a command that locks the filter locks the job, too.
    return lock_directory(job_dir / "bloom", "JOBDIR")
