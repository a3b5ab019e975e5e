"""A crawl's job: whether its last run was killed, and what becomes of its queue and filter then."""

import logging
from collections.abc import Sequence
from pathlib import Path

from scrapy_bloom.exceptions import UncleanShutdownError
from scrapy_bloom.job import paths as jobdir
from scrapy_bloom.job.disk import sync_tree
from scrapy_bloom.text import counted

logger = logging.getLogger(__name__)


class Job:
    """Scrapy's job directory, if the crawl has one, beside a filter wherever that is kept.

    Args:
        path: the job directory, which the crawl has locked (`lock_job`); or None.
        on_unclean_shutdown: BLOOM_ON_UNCLEAN_SHUTDOWN.
        only_crawled: the filter holds no request that was queued only (BLOOM_RECORD_ON).
    """

    def __init__(
        self,
        path: Path | None = None,
        on_unclean_shutdown: str = "keep",
        *,
        only_crawled: bool = False,
    ) -> None:
        self.path = path
        self.on_unclean_shutdown = on_unclean_shutdown
        self._marked: str | None = None
        self._judged_by_times = False
        self._only_crawled = only_crawled

    def owns(self, directory: Path) -> bool:
        """Return whether a filter's directory is the job's own, and locked with the job."""
        return self.path is not None and directory.resolve() == (self.path / "bloom").resolve()

    def begin(self, filter_id: str = "") -> None:
        """Mark the job as in use: a run that finds the mark knows that the last one was killed."""
        self._marked = filter_id
        if self.path is not None:
            jobdir.mark_as_used(self.path, filter_id)

    def goes_on_with(self, filter_id: str) -> None:
        """Name that filter in the mark, if the crawl has begun: it records there from now on."""
        if self._marked not in {None, filter_id}:
            self.begin(filter_id)

    def used(self, filter_id: str) -> bool:
        """Return whether the killed run recorded in that filter, or may have."""
        return self.path is not None and jobdir.filter_in_use(self.path) in {"", filter_id}

    def drop_queue(self) -> None:
        """Set the queue of a killed run aside, whose requests the filter lacks; see `recover`."""
        assert self.path is not None
        self._stop_if_asked(self.not_closed(None))
        if (queue := self.path / jobdir.QUEUE).exists():
            logger.warning(
                "The last run with %s was killed, and its queue is broken: it was set aside as %s. "
                "The filter in Redis holds none of its requests, and is used as it is",
                self.path,
                jobdir.set_aside(queue),
            )
        self.end()

    def end(self) -> None:
        """Remove the in-use mark after a clean close; raises OSError: the mark is still there."""
        if self.path is not None:
            # A job that is closed on the disk must have its requests there. Scrapy syncs nothing.
            sync_tree(self.path / jobdir.QUEUE)
            (self.path / jobdir.IN_USE).unlink(missing_ok=True)

    def was_killed(self, *, has_filter: bool) -> bool:
        """Return whether the last run with this job, or with its filter, did not end well."""
        if self.path is None:
            return False
        if (self.path / jobdir.IN_USE).exists():
            return True
        if has_filter:  # no mark: the last run with it was closed
            return False
        # The first run after one with Scrapy's own filter: was that one closed?
        self._judged_by_times = not jobdir.was_closed_by_scrapy(self.path)
        return self._judged_by_times

    def importable(self) -> Path | None:
        """Return the job's requests.seen, if its queue is still there."""
        # After a reset the queue is gone: what it held must not be recorded and never crawled.
        if self.path is None or jobdir.was_set_aside(self.path, jobdir.QUEUE):
            return None
        seen = self.path / jobdir.SEEN
        return seen if seen.exists() else None

    def recover(self, name: Path | str | None, count: int | None) -> list[str] | None:
        """Set the queue of a killed run aside, as the settings say.

        By default ("auto"), a filter beside a queue in memory is kept.

        Args:
            name: the filter, for people; None if there is none: then it is about the queue.
            count: requests in it, None if there is none.

        Returns:
            None if the filter is kept. Otherwise the new paths of the queue: the filter has to be
            set aside, too, before `start_over`.

        Raises:
            UncleanShutdownError: the settings say "stop"; all is as it was.
        """
        what = self.not_closed(name)
        self._stop_if_asked(what)
        moved = []
        # The queue first, and what bears the mark last: if the process dies in between, the mark is
        # still there, and the next run continues.
        if self.path is not None and (queue := self.path / jobdir.QUEUE).exists():
            moved.append(str(jobdir.set_aside(queue)))
        if self.on_unclean_shutdown == "keep" or (
            self.on_unclean_shutdown == "auto" and self.path is None
        ):
            self._warn_of_lost_queue(what, count, moved)
            return None
        return moved

    def start_over(self, name: Path | str | None, moved: Sequence[str]) -> None:
        """Log that queue and filter were set aside, and remove the in-use mark; raises OSError."""
        logger.warning(
            "%s, so the requests that were queued then are lost, and the filter would report them "
            "as duplicates. The crawl starts over with an empty filter, and pages are crawled "
            "again rather than lost. Set aside, not deleted: %s. With SCHEDULER = "
            "'scrapy_bloom.CrashSafeScheduler', a job survives that",
            self.not_closed(name),
            ", ".join(moved),
        )
        self.end()

    def _warn_of_lost_queue(self, what: str, count: int | None, moved: Sequence[str]) -> None:
        kept = f" (at least {counted(count, 'request')})" if count is not None else ""
        if self._only_crawled:
            logger.warning(
                "%s. What it had crawled is kept%s. What it had queued is crawled now wherever "
                "this run finds a link to it: list pages should be requested with "
                'meta={"bloom_filter": "run"}. (If that run had BLOOM_RECORD_ON = "scheduled", '
                "the filter reports what it had queued as duplicates, and it is never crawled)",
                what,
                kept,
            )
            return
        logger.warning(
            "%s. What was recorded is kept%s, so the filter reports the requests that were queued "
            "at that time as duplicates, and they are never crawled%s. Set "
            'BLOOM_ON_UNCLEAN_SHUTDOWN = "reset" to crawl everything again',
            what,
            kept,
            f" (Scrapy's queue would fail now; it was set aside: {moved[0]})" if moved else "",
        )

    def not_closed(self, name: Path | str | None) -> str:
        """Say that the last run did not close its filter (or, if that is None, the job)."""
        name = name or self.path or ""
        why = "it was killed, or ran out of memory, or the machine went down"
        if self._judged_by_times:
            why += "; or the files were copied without their times, see docs/faq.md"
        return f"The last run did not close {name} ({why})"

    def _stop_if_asked(self, what: str) -> None:
        if self.on_unclean_shutdown == "stop":
            raise UncleanShutdownError(
                f'{what}, and BLOOM_ON_UNCLEAN_SHUTDOWN is "stop"; set it to "reset" to set the '
                'filter aside and crawl everything again, or to "keep" to go on without the '
                "requests that were queued at that time. Nothing was changed"
            )
