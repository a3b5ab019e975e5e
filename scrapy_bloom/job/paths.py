"""Name the files of a job directory, and read the state that Scrapy keeps there.

Scrapy writes the state of its disk queue (`requests.queue/active.json`) only at a clean close.
After a kill, the requests in the queue are lost, and a stale state makes the resumed crawl hang.
"""

import re
import time
from pathlib import Path

from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.job.disk import log_and_index

QUEUE = "requests.queue"  # a directory: Scrapy's disk queue
SEEN = "requests.seen"  # the fingerprints that Scrapy's own filter recorded
DATABASE = "requests.sqlite"  # CrashSafeScheduler's queue
# The in-use marker: a crawl with our filter runs in this job, or was not closed. The header of a
# filter has an in-use flag, too, but the marker stays with the queue, wherever the filter is kept.
IN_USE = "bloom.in-use"
SET_ASIDE = ".set-aside-"
# Scrapy's extension SpiderState writes the last one.
_SIGNS = (QUEUE, SEEN, DATABASE, IN_USE, "spider.state")
DATABASE_ID = 0x626C6F6D  # "bloom", the application id of our SQLite database
_FILE_NAME = re.compile(r"generation-\d{4,}\.bloom")
_DATABASE_ID_AT = 68  # in the header of SQLite's file format


def is_job(directory: Path) -> bool:
    """Return whether a directory has files of a JOBDIR, from Scrapy or from scrapy_bloom."""
    return any((directory / name).exists() for name in _SIGNS)


def check_file(path: Path) -> None:
    """Raise a StorageError for a pipe, socket or device, because reading it might never end.

    The file need not exist. Raises OSError if its directory is not readable.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        raise StorageError(
            f"{path} is a pipe, a socket or a device, and not a regular file; it was left as it "
            "is: remove it, or restore the file from a backup"
        )


def is_database(path: Path) -> bool:
    """Return whether a file has the SQLite application id of CrashSafeScheduler's queue."""
    try:
        check_file(path)
        with path.open("rb") as file:
            head = file.read(_DATABASE_ID_AT + 4)
    except OSError:
        return False
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
    for part, new in zip(log_and_index(path), log_and_index(target), strict=True):
        if part.exists():
            part.rename(new)
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
