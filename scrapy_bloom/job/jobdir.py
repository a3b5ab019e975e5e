"""Name, lock and look at the files of a job directory, and at those of a filter's directory.

Scrapy writes the state of its disk queue (`requests.queue/active.json`) only at a clean close.
After a kill, the requests in the queue are lost, and a stale state makes the resumed crawl hang.
"""

import contextlib
import errno
import os
import re
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
DATABASE = "requests.sqlite"  # CrashSafeScheduler's queue
LOCK_NAME = "lock"  # in the directory of a filter
SET_ASIDE = ".set-aside-"
# Scrapy's extension SpiderState writes the last one.
_SIGNS = (QUEUE, SEEN, DATABASE, "spider.state")
DATABASE_ID = 0x626C6F6D  # "bloom", the application id of our SQLite database
_FILE_NAME = re.compile(r"generation-\d{4,}\.bloom")
_DATABASE_ID_AT = 68  # in the header of SQLite's file format


def is_job(directory: Path) -> bool:
    """Return whether a directory has files of a JOBDIR, from Scrapy or from scrapy_bloom."""
    return any((directory / name).exists() for name in _SIGNS)


def is_database(path: Path) -> bool:
    """Return whether a file has the SQLite application id of CrashSafeScheduler's queue.

    Raises a StorageError if there is a file that cannot be read: it may be that queue.
    """
    try:
        with opened(path) as file:
            head = file.read(_DATABASE_ID_AT + 4)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror or error}") from error
    return head[_DATABASE_ID_AT:] == DATABASE_ID.to_bytes(4, "big")


def was_closed_by_scrapy(job_dir: Path) -> bool:
    """Return whether Scrapy's scheduler closed its queue, as far as the files can tell.

    The scheduler writes `active.json` last, and each later change of the queue touches another
    file, or the directory of a file that was emptied and removed. Without `active.json`, nothing
    was lost if there is no queue, or if neither the queue nor requests.seen has any request.
    """
    queue = job_dir / QUEUE
    state = queue / "active.json"
    if not state.exists():
        seen = job_dir / SEEN
        was_recorded = seen.exists() and seen.stat().st_size > 0
        return not has_queued(job_dir) and not (was_recorded and queue.exists())
    # One second of tolerance: copies of a directory and clocks of file systems are not exact.
    latest = state.stat().st_mtime + 1
    return all(path.stat().st_mtime <= latest for path in [queue, *queue.rglob("*")])


def has_state(job_dir: Path) -> bool:
    """Return whether Scrapy's disk queue has the state that a clean close writes."""
    return (job_dir / QUEUE / "active.json").exists()


def has_queued(job_dir: Path) -> bool:
    """Return whether Scrapy's disk queue holds requests; Scrapy removes files that are empty."""
    files = (path for path in (job_dir / QUEUE).rglob("*") if path.is_file())
    return any(path.name != "active.json" for path in files)


def set_aside(path: Path) -> Path:
    """Rename a file or directory to `NAME.set-aside-YYYYMMDD-HHMMSS`; return its new path."""
    target = first = path.with_name(f"{path.name}{SET_ASIDE}{time.strftime('%Y%m%d-%H%M%S')}")
    number = 2
    while target.exists():
        target = first.with_name(f"{first.name}-{number}")
        number += 1
    return path.rename(target)


def was_set_aside(directory: Path, name: str) -> bool:
    """Return whether a file whose name matches a glob pattern was set aside in a directory."""
    return any(directory.glob(f"{name}{SET_ASIDE}*"))


def file_name(number: int) -> str:
    """Return the name of a generation's file."""
    return f"generation-{number:04d}.bloom"


def filter_files(path: Path) -> list[Path]:
    """Return the files of the generations in a directory, oldest first."""
    if not path.is_dir():
        return []
    found = [file for file in path.iterdir() if _FILE_NAME.fullmatch(file.name)]
    return sorted(found, key=lambda file: int(file.stem.partition("-")[2]))


def lock_job(job_dir: Path) -> "FileLock":
    """Lock a job directory for one crawl, without waiting.

    Raises:
        LockedError: another crawl holds the lock.
        StorageError: the directory cannot be locked.
    """
    # In the filter's directory, so that a command that locks the filter locks the job, too.
    return lock_directory(job_dir / "bloom")


def lock_directory(directory: Path) -> "FileLock":
    """Lock the directory of a filter for one crawl or command, without waiting.

    Args:
        directory: the function creates it if it is missing.

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
        check_file(directory / LOCK_NAME, writes=True)
        lock = _hard_lock(directory / LOCK_NAME)
        lock.acquire()
    except Timeout:
        raise LockedError(
            f"{directory} is in use by another running crawl; wait for it to end, end it with "
            "scrapy bloom stop, or use another JOBDIR"
        ) from None
    except (FileExistsError, NotADirectoryError) as error:
        file = next((each for each in (directory, *directory.parents) if each.is_file()), directory)
        raise StorageError(
            f"{file} is a file, and {directory} has to be a directory; give the crawl another "
            "JOBDIR"
        ) from error
    except (OSError, NotImplementedError) as error:  # filelock raises the latter for ENOSYS
        if isinstance(error, NotImplementedError) or error.errno == errno.ENOSYS:
            raise StorageError(
                f"{directory} is on a file system without locks (flock), where two crawls could "
                f"damage each other's files; give the crawl another JOBDIR"
            ) from error
        raise StorageError(
            f"{directory} cannot be written to: {error.strerror or error}; {advice(error)}, or "
            "give the crawl another JOBDIR"
        ) from error
    return lock


@contextlib.contextmanager
def no_new_directory(path: Path) -> Iterator[None]:
    """If a `with` block fails, remove the directories that it has made, unless they have files."""
    missing = [each for each in (path, *path.parents) if not each.exists()]
    try:
        yield
    except LockedError:  # another process has made them
        raise
    except BaseException:
        with contextlib.suppress(OSError):
            for directory in missing:
                if [each.name for each in directory.iterdir()] == [LOCK_NAME]:
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

    Raises a StorageError if the file is none of its directory: somebody may have planted it, so
    that the process that holds it is ended.
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
