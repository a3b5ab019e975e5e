"""The lock file by which one crawl at a time has a job, or the directory of a filter."""

import errno
import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from scrapy_bloom.exceptions import LockedError, StorageError

if TYPE_CHECKING:
    from filelock import FileLock


LOCK_NAME = "lock"  # beside the files of a filter


def lock_directory(directory: Path, settings: str = "JOBDIR or BLOOM_DIR") -> "FileLock":
    """Take a filter's directory for one crawl, at once or not at all.

    Args:
        directory: made if missing.
        settings: which ones choose another directory.

    Raises:
        LockedError: another crawl has it.
        StorageError: it cannot be written to, or its file system has no locks.
    """
    from filelock import Timeout  # noqa: PLC0415 - half a MB, for crawls with a file only

    try:
        directory.mkdir(parents=True, exist_ok=True)
        if not os.access(directory, os.W_OK):
            # Its files might still be writable, but then setting one aside would fail later.
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
    except (OSError, NotImplementedError) as error:  # the latter is what filelock makes of ENOSYS
        if isinstance(error, NotImplementedError) or error.errno == errno.ENOSYS:
            raise StorageError(
                f"{directory} is on a file system without locks (flock), where two crawls could "
                f"spoil each other's files; give the crawl another {settings}"
            ) from error
        raise StorageError(
            f"{directory} cannot be written to: {error.strerror or error}; give the crawl the "
            f"right to write there, or another {settings}"
        ) from error
    return lock


def holders(path: Path) -> list[int] | None:
    """Return the ids of the processes of this machine that hold a lock; None where nobody can tell.

    To try the lock, if only for an instant, would turn away a crawl that starts just then. So it is
    read from Linux's list of locks. The file need not exist. The id is 0 of a process that this one
    cannot see, in another container for example.
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
    held = [line.split() for line in lines if "FLOCK" in line and f":{file.st_ino} " in line]
    if found := [fields for fields in held if inode in fields]:
        return [max(0, int(fields[fields.index(inode) - 1])) for fields in found]
    return None if held else []  # some file systems show another number of the device


def _hard_lock(path: Path) -> "FileLock":
    """Make a lock that ends with its process; not yet taken."""
    from filelock import FileLock  # noqa: PLC0415 - as above

    # Not bound to a thread: a crawl may be closed by another. And whoever can open it can lock it.
    new = partial(FileLock, path, timeout=0, mode=0o600, thread_local=False)
    try:
        # Not a mere note in the file, which a crawl leaves for ever that is killed.
        return new(fallback_to_soft=False)
    except TypeError:  # an older filelock, which has nothing to fall back to
        return new()


def lock_job(job_dir: Path) -> "FileLock":
    """Take a job directory for one crawl, at once or not at all, wherever its filter is kept.

    Raises a LockedError if another crawl has it, and a StorageError if it cannot be locked.
    """
    # So commands for the filter there lock the job, too.
    return lock_directory(job_dir / "bloom", "JOBDIR")
