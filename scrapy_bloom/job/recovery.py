"""Detect that the last process of a job under Scrapy's scheduler was killed."""

from pathlib import Path

from scrapy_bloom.job import jobdir
from scrapy_bloom.job.disk import sync_tree


class Job:
    """The job directory of a crawl, if it has one.

    Args:
        path: the job directory, locked by `lock_job`; None if the crawl has none.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path

    def was_killed(self, *, has_filter: bool) -> bool:
        """Return whether the last process with this queue was killed, as far as the queue can tell.

        Args:
            has_filter: whether the job has a filter, which says that it was closed.
        """
        if self.path is None:
            return False
        if has_filter and not (self.path / jobdir.SEEN).exists():
            # Only scrapy_bloom has run here. The files may be copies, without their times.
            return jobdir.has_queued(self.path) and not jobdir.has_state(self.path)
        # The last process may have used Scrapy's own filter.
        return not jobdir.was_closed_by_scrapy(self.path)

    def has_queued(self) -> bool:
        """Return whether Scrapy's queue has requests."""
        return self.path is not None and jobdir.has_queued(self.path)

    def importable(self) -> Path | None:
        """Return the path of the job's requests.seen, unless its queue was set aside."""
        # Otherwise the requests of that queue would be recorded and never crawled.
        if self.path is None or jobdir.was_set_aside(self.path, jobdir.QUEUE):
            return None
        seen = self.path / jobdir.SEEN
        return seen if seen.exists() else None

    def set_queue_aside(self) -> list[str]:
        """Rename Scrapy's queue; return its new path in a list, or [] if there is no queue."""
        if self.path is None or not (self.path / jobdir.QUEUE).exists():
            return []
        return [str(jobdir.set_aside(self.path / jobdir.QUEUE))]

    def sync_queue(self) -> None:
        """Sync Scrapy's queue, which Scrapy does not do; raises OSError."""
        if self.path is not None:
            sync_tree(self.path / jobdir.QUEUE)
