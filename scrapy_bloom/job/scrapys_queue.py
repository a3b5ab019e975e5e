"""Look at the disk queue of Scrapy's own scheduler in a job directory, and set it aside.

Scrapy writes its state (`requests.queue/active.json`) only at a clean close. After a kill, the
requests in the queue are lost, and an outdated state makes the resumed crawl hang.
"""

from pathlib import Path

from scrapy_bloom.job import jobdir
from scrapy_bloom.job.jobdir import QUEUE, SEEN


def was_killed(job_dir: Path, *, has_filter: bool) -> bool:
    """Return whether the last process with the queue was killed, as far as the queue can tell.

    If the job has a filter, that says that it was closed.
    """
    if has_filter and not (job_dir / SEEN).exists():
        # Only scrapy_bloom has run here. The files may be copies, without their times.
        return has_queued(job_dir) and not has_state(job_dir)
    # The last process may have used Scrapy's own filter.
    return not was_closed_by_scrapy(job_dir)


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


def importable(job_dir: Path) -> Path | None:
    """Return the path of the job's requests.seen, unless its queue or filter was set aside."""
    # Otherwise the requests of that queue would be recorded and never crawled.
    for name in (QUEUE, jobdir.FILE):
        if any(job_dir.glob(f"{name}{jobdir.SET_ASIDE}*")):
            return None
    return seen if (seen := job_dir / SEEN).exists() else None
