"""Paths in a job directory, and what Scrapy keeps there, as far as it concerns a filter.

Scrapy writes the state of its disk queue (`requests.queue/active.json`) at a clean close only.
After a kill, the requests of that time are lost, and a stale state makes the resumed crawl hang.
"""

import contextlib
import os
import re
import time
from pathlib import Path

from scrapy_bloom.job.sqlite_files import beside

SET_ASIDE = ".set-aside-"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # Linux's; of each start of the machine
DATABASE_ID = 0x626C6F6D  # "bloom", the application id of our SQLite database
_FILE_NAME = re.compile(r"generation-(\d{4,})\.bloom")
_DATABASE_ID_AT = 68  # in the header of SQLite's file format


def queue_path(job_dir: Path) -> Path:
    """Return the path of Scrapy's disk queue, a directory."""
    return job_dir / "requests.queue"


def seen_path(job_dir: Path) -> Path:
    """Return the path of what Scrapy's own filter recorded."""
    return job_dir / "requests.seen"


def database_path(job_dir: Path) -> Path:
    """Return the path of CrashSafeScheduler's queue, a SQLite database."""
    return job_dir / "requests.sqlite"


def is_database(path: Path) -> bool:
    """Return whether a file is such a database, by its first bytes: an empty one is not."""
    try:
        with path.open("rb") as file:
            head = file.read(_DATABASE_ID_AT + 4)
    except OSError:
        return False
    return head[_DATABASE_ID_AT:] == DATABASE_ID.to_bytes(4, "big")


def was_cut_to_nothing(path: Path) -> bool:
    """Return whether SQLite would take an existing file for a new one: it has 0 or 1 bytes."""
    return path.is_file() and path.stat().st_size <= 1


def database_changed_at(job_dir: Path) -> float:
    """Return when CrashSafeScheduler's queue was last written to, in seconds since 1970."""
    database = database_path(job_dir)
    log, _ = beside(database)
    return max(path.stat().st_mtime for path in (database, log) if path.exists())


def in_use_path(job_dir: Path) -> Path:
    """Return the path of our note: a crawl of ours runs in this job, or was not closed.

    A filter's header says so, too; this note stays with the queue, wherever the filter is kept.
    """
    return job_dir / "bloom.in-use"


def was_closed_by_scrapy(job_dir: Path) -> bool:
    """Return whether Scrapy's scheduler closed its queue, as far as the files can tell.

    It writes `active.json` last of all, and each request taken or added afterwards changes
    another file, or the directory of one that was emptied and removed. Where there is no queue,
    and nothing that was recorded beside one, nothing can have been lost.
    """
    queue = queue_path(job_dir)
    state = queue / "active.json"
    if not state.exists():
        seen = seen_path(job_dir)
        recorded = seen.exists() and seen.stat().st_size > 0
        queued = any(path.is_file() for path in queue.rglob("*"))
        return not queued and not (recorded and queue.exists())
    # A second: copies of a job directory, and clocks of file systems, are not exact.
    latest = state.stat().st_mtime + 1
    return all(path.stat().st_mtime <= latest for path in [queue, *queue.rglob("*")])


def has_queued(job_dir: Path) -> bool:
    """Return whether Scrapy's disk queue holds requests: emptied files are removed."""
    files = (path for path in queue_path(job_dir).rglob("*") if path.is_file())
    return any(path.name != "active.json" for path in files)


def note_end(job_dir: Path) -> None:
    """Note that a crawl of ours ended well, by what Scrapy's own filter had recorded before it."""
    with contextlib.suppress(OSError):  # then the next run looks at the times of Scrapy's files
        if (size := _seen_size(job_dir)) is not None:
            _end_path(job_dir).write_text(
                f"{size}\nbytes were in requests.seen when a crawl with scrapy_bloom ended here.\n"
            )


def scrapys_filter_ran_last(job_dir: Path) -> bool:
    """Return whether Scrapy's own filter recorded something after the last crawl of ours ended.

    An empty requests.seen tells that it ran, too: since Scrapy 2.19, what it has recorded stays in
    a buffer for a while, and a killed run leaves no more than the file.
    """
    size = _seen_size(job_dir)
    if size is None:
        return False
    try:
        noted, *_ = _end_path(job_dir).read_text("utf-8", "replace").split("\n")
    except FileNotFoundError:
        return True
    return noted != str(size)


def _end_path(job_dir: Path) -> Path:
    return job_dir / "bloom.ended"


def _seen_size(job_dir: Path) -> int | None:
    """Return the length of requests.seen, None if there is none."""
    seen = seen_path(job_dir)
    return seen.stat().st_size if seen.exists() else None


def set_in_use(job_dir: Path, filter_id: str = "") -> None:
    """Note that the job is in use, by a crawl with that filter if there are several."""
    with in_use_path(job_dir).open("w") as note:
        note.write(f"A crawl with scrapy_bloom runs here, or was killed.\n{filter_id}\n")
        note.write(f"{boot_id()}\n")
        note.flush()
        os.fsync(note.fileno())


def filter_in_use(job_dir: Path) -> str | None:
    """Return the filter of the killed crawl; empty if unknown, None if there is no note."""
    lines = _in_use_lines(job_dir)
    return None if lines is None else lines[0]


def was_machine_restarted(job_dir: Path) -> bool:
    """Return whether a crawl used the job before the machine was last started, and left it so."""
    boot = (_in_use_lines(job_dir) or ["", ""])[1]
    return bool(boot) and boot != boot_id()


def _in_use_lines(job_dir: Path) -> list[str] | None:
    """Return the note's filter and boot, each empty if unknown; None if there is no note."""
    try:
        _, *lines = in_use_path(job_dir).read_text("utf-8", "replace").split("\n")
    except FileNotFoundError:
        return None
    # Without its end, the last line was being written at that moment.
    return [*lines[:-1], "", ""][:2]


def boot_id() -> str:
    """Return which start of the machine this is; empty where that cannot be known."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""


def clear_in_use(job_dir: Path) -> None:
    """Remove the note: the job was closed."""
    with contextlib.suppress(FileNotFoundError):
        in_use_path(job_dir).unlink()


def set_aside(path: Path) -> Path:
    """Rename a file or directory out of the way, within its directory; return its new path.

    That is `NAME.set-aside-YYYYMMDD-HHMMSS`, which did not exist before.
    """
    stamp = time.strftime("%Y%m%d-%H%M%S")
    target = path.with_name(f"{path.name}{SET_ASIDE}{stamp}")
    number = 2
    while target.exists():
        target = path.with_name(f"{path.name}{SET_ASIDE}{stamp}-{number}")
        number += 1
    for part, new in zip(beside(path), beside(target), strict=True):
        if part.exists():
            part.rename(new)
    return path.rename(target)


def was_set_aside(directory: Path, name: str) -> bool:
    """Return whether a file of that name (a glob pattern) was set aside in a directory."""
    return any(directory.glob(f"{name}{SET_ASIDE}*"))


def file_name(number: int) -> str:
    """Return the name of a generation's file."""
    return f"generation-{number:04d}.bloom"


def filter_files(path: Path) -> list[Path]:
    """Find the files of generations in a directory, oldest first; none if there is no directory."""
    if not path.is_dir():
        return []
    numbered = [
        (int(match[1]), each)
        for each in path.iterdir()
        if (match := _FILE_NAME.fullmatch(each.name))
    ]
    return [each for _, each in sorted(numbered)]
