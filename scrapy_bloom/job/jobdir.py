"""Name and lock the files of a job directory."""

import contextlib
import errno
import os
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from scrapy_bloom.exceptions import LockedError, StorageError
from scrapy_bloom.job.disk import advice, check_file, opened

if TYPE_CHECKING:
    from filelock import FileLock

QUEUE = "requests.queue"  # a directory: Scrapy's disk queue
SEEN = "requests.seen"  # the fingerprints that Scrapy's own filter recorded
FILE = "bloom.sqlite"  # the filter, and CrashSafeScheduler's queue
LOCK_NAME = "bloom.lock"
SET_ASIDE = ".set-aside-"
DATABASE_ID = 0x626C6F6D  # "bloom", the application id of our SQLite database
_DATABASE_ID_AT = 68  # in the header of SQLite's file format


def is_database(path: Path) -> bool:
    """Return whether a file has the SQLite application id of a job's file.

    Raises a StorageError if there is a file that cannot be read: it may be that of a job.
    """
    try:
        with opened(path) as file:
            head = file.read(_DATABASE_ID_AT + 4)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror or error}") from error
    return head[_DATABASE_ID_AT:] == DATABASE_ID.to_bytes(4, "big")


def set_aside(path: Path) -> Path:
    """Rename a file or directory to `NAME.set-aside-YYYYMMDD-HHMMSS`; return its new path."""
    target = first = path.with_name(f"{path.name}{SET_ASIDE}{time.strftime('%Y%m%d-%H%M%S')}")
    number = 2
    while target.exists():
        target = first.with_name(f"{first.name}-{number}")
        number += 1
    return path.rename(target)


def lock_job(job_dir: Path) -> "FileLock":
    """Lock a job directory for one crawl or command, without waiting; create it if missing.

    Raises a LockedError if another crawl holds the lock, or a StorageError.
    """
    from filelock import Timeout  # noqa: PLC0415 - half a MB, which only crawls with files need

    try:
        job_dir.mkdir(parents=True, exist_ok=True)
        if not os.access(job_dir, os.W_OK):
            # Its files may still be writable, but a later attempt to rename one would fail.
            number = errno.EACCES
            if sys.platform != "win32" and os.statvfs(job_dir).f_flag & os.ST_RDONLY:
                number = errno.EROFS
            raise OSError(number, os.strerror(number))  # noqa: TRY301 - as one of the file system
        check_file(job_dir / LOCK_NAME, writes=True)
        lock = _hard_lock(job_dir / LOCK_NAME)
        lock.acquire()
    except Timeout:
        raise LockedError(
            f"{job_dir} is in use by another running crawl; wait for it to end, end it with "
            "scrapy bloom stop, or use another JOBDIR"
        ) from None
    except (FileExistsError, NotADirectoryError) as error:
        file = next((part for part in (job_dir, *job_dir.parents) if part.is_file()), job_dir)
        raise StorageError(
            f"{file} is a file, and {job_dir} has to be a directory; give the crawl another JOBDIR"
        ) from error
    except (OSError, NotImplementedError) as error:  # filelock raises the latter for ENOSYS
        if isinstance(error, NotImplementedError) or error.errno == errno.ENOSYS:
            raise StorageError(
                f"{job_dir} is on a file system without locks (flock), where two crawls could "
                f"damage each other's files; give the crawl another JOBDIR"
            ) from error
        raise StorageError(
            f"{job_dir} cannot be written to: {error.strerror or error}; {advice(error)}, or "
            "give the crawl another JOBDIR"
        ) from error
    return lock


@contextlib.contextmanager
def no_new_directory(path: Path) -> Iterator[None]:
    """If a `with` block fails, remove the directories that it has made, unless they have files."""
    missing = [part for part in (path, *path.parents) if not part.exists()]
    try:
        yield
    except LockedError:  # another process has made them
        raise
    except BaseException:
        with contextlib.suppress(OSError):
            for directory in missing:
                if [file.name for file in directory.iterdir()] == [LOCK_NAME]:
                    (directory / LOCK_NAME).unlink()
                directory.rmdir()
        raise


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


def holders(path: Path) -> list[int] | None:
    """Return the ids of the processes on this machine that hold a lock; None if unknown.

    Trying the lock, even for an instant, could turn away a crawl that starts at that moment, so the
    function reads Linux's list of locks. The file need not exist. A process that this one cannot
    see, for example in another container, has the id 0.

    Raises a StorageError if the file is a link: another user may have put it there, so that
    `scrapy bloom stop` ends a process that holds another lock.
    """
    check_file(path, writes=True)
    if sys.platform == "win32":
        return None
    try:
        lines = Path("/proc/locks").read_text("ascii").splitlines()
        file = path.lstat()
        if file.st_uid != path.parent.stat().st_uid:
            return None
    except FileNotFoundError:
        return [] if Path("/proc/locks").exists() else None
    except OSError:
        return None
    inode = f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}:{file.st_ino}"
    locks = [line.split() for line in lines if "FLOCK" in line and f":{file.st_ino} " in line]
    if found := [fields for fields in locks if inode in fields]:
        return [max(0, int(fields[fields.index(inode) - 1])) for fields in found]
    return None if locks else []  # some file systems list another device number
