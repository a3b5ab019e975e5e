"""Paths in a job directory, and what Scrapy keeps there, as far as it concerns a filter.

Scrapy writes the state of its disk queue (`requests.queue/active.json`) at a clean close only.
After a kill, the requests of that time are lost, and a stale state makes the resumed crawl hang.
"""

import re
import time
from pathlib import Path

from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.job.disk import beside, replace_file

QUEUE = "requests.queue"  # a directory: Scrapy's disk queue
SEEN = "requests.seen"  # what Scrapy's own filter recorded
DATABASE = "requests.sqlite"  # CrashSafeScheduler's queue
# Our mark that a crawl of ours runs in this job, or was not closed. A filter's header says so, too;
# this mark stays with the queue, wherever the filter is kept.
IN_USE = "bloom.in-use"
SET_ASIDE = ".set-aside-"
# The last one is of Scrapy's extension.
_SIGNS = (QUEUE, SEEN, DATABASE, IN_USE, "spider.state")
DATABASE_ID = 0x626C6F6D  # "bloom", the application id of our SQLite database
_FILE_NAME = re.compile(r"generation-\d{4,}\.bloom")
_DATABASE_ID_AT = 68  # in the header of SQLite's file format


def is_job(directory: Path) -> bool:
    """Return whether a directory is the JOBDIR of a crawl, by what Scrapy or we have left there."""
    return any((directory / name).exists() for name in _SIGNS)


def check_file(path: Path) -> None:
    """Raise a StorageError if reading a file might wait for ever, since it is no regular one.

    Raises OSError if nobody may look. The file need not exist.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        raise StorageError(
            f"{path} is a pipe, a socket or a device, and not a regular file; it was left as it "
            "is: remove it, or restore the file from a backup"
        )


def is_database(path: Path) -> bool:
    """Return whether a file is CrashSafeScheduler's queue, by its first bytes, if it has any."""
    try:
        check_file(path)
        with path.open("rb") as file:
            head = file.read(_DATABASE_ID_AT + 4)
    except OSError:
        return False
    return head[_DATABASE_ID_AT:] == DATABASE_ID.to_bytes(4, "big")


def was_closed_by_scrapy(job_dir: Path) -> bool:
    """Return whether Scrapy's scheduler closed its queue, as far as the files can tell.

    It writes `active.json` last of all, and each request taken or added afterwards changes
    another file, or the directory of one that was emptied and removed. Where there is no queue,
    and nothing that was recorded beside one, nothing can have been lost.
    """
    queue = job_dir / QUEUE
    state = queue / "active.json"
    if not state.exists():
        seen = job_dir / SEEN
        was_recorded = seen.exists() and seen.stat().st_size > 0
        return not has_queued(job_dir) and not (was_recorded and queue.exists())
    # A second: copies of a job directory, and clocks of file systems, are not exact.
    latest = state.stat().st_mtime + 1
    return all(path.stat().st_mtime <= latest for path in [queue, *queue.rglob("*")])


def has_queued(job_dir: Path) -> bool:
    """Return whether Scrapy's disk queue holds requests: emptied files are removed."""
    files = (path for path in (job_dir / QUEUE).rglob("*") if path.is_file())
    return any(path.name != "active.json" for path in files)


def mark_as_used(job_dir: Path, filter_id: str = "") -> None:
    """Mark the job as in use, by a crawl with that filter if there are several."""
    text = f"A crawl with scrapy_bloom runs here, or was killed.\n{filter_id}\n"
    replace_file(job_dir / IN_USE, text)


def filter_in_use(job_dir: Path) -> str | None:
    """Return the filter of the killed crawl; empty if unknown, None if there is no mark."""
    check_file(job_dir / IN_USE)
    try:
        _, *lines = (job_dir / IN_USE).read_text("utf-8", "replace").split("\n")
    except FileNotFoundError:
        return None
    # Without its end, the line was being written at that moment.
    return [*lines[:-1], ""][0]


def set_aside(path: Path) -> Path:
    """Rename a file or directory to `NAME.set-aside-YYYYMMDD-HHMMSS`; return its new path."""
    target = first = path.with_name(f"{path.name}{SET_ASIDE}{time.strftime('%Y%m%d-%H%M%S')}")
    number = 2
    while target.exists():
        target = first.with_name(f"{first.name}-{number}")
        number += 1
    for part, new in zip(beside(path), beside(target), strict=True):
        if part.exists():
            part.rename(new)
    return path.rename(target)


def was_set_aside(directory: Path, name: str) -> bool:
    """Return whether something of that name (a glob pattern) was set aside in a directory."""
    return any(directory.glob(f"{name}{SET_ASIDE}*"))


def file_name(number: int) -> str:
    """Return the name of a generation's file."""
    return f"generation-{number:04d}.bloom"


def filter_files(path: Path) -> list[Path]:
    """Find the files of generations in a directory, oldest first; none if there is no directory."""
    if not path.is_dir():
        return []
    found = [file for file in path.iterdir() if _FILE_NAME.fullmatch(file.name)]
    return sorted(found, key=lambda file: int(file.stem.partition("-")[2]))
