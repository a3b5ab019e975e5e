"""A crawl's job: whether its last run was killed, and what becomes of its queue and filter then."""

import logging
from collections.abc import Callable, Sequence
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
        self._noted: str | None = None
        self._judged_by_times = False
        self._only_crawled = only_crawled

    def owns(self, directory: Path) -> bool:
        """Return whether a filter's directory is the job's own, and locked with the job."""
        return self.path is not None and directory.resolve() == (self.path / "bloom").resolve()

    def begin(self, filter_id: str = "") -> None:
        """Note that the job is in use: whoever finds the note knows that it did not end well."""
        self._noted = filter_id
        if self.path is not None:
            jobdir.set_in_use(self.path, filter_id)

    def goes_on_with(self, filter_id: str) -> None:
        """Note that the crawl, if it has begun, records in that filter from now on."""
        if self._noted not in {None, filter_id}:
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
        """Take the note away: the crawl has ended well. Raises OSError: the note is still there."""
        if self.path is not None:
            # A job that is closed on the disk must have its requests there. Scrapy syncs nothing.
            sync_tree(self.path / jobdir.QUEUE)
            jobdir.note_end(self.path)

    def was_killed(self, *, has_filter: bool) -> bool:
        """Return whether the last run with this job, or with its filter, did not end well."""
        if self.path is None:
            return False
        if (self.path / jobdir.IN_USE).exists():
            return True
        # The first run after one with Scrapy's own filter: was that one closed?
        if has_filter and not jobdir.scrapys_filter_ran_last(self.path):
            return False
        self._judged_by_times = not jobdir.was_closed_by_scrapy(self.path)
        return self._judged_by_times

    def importable(self) -> Path | None:
        """Return the job's requests.seen, if its queue is still there."""
        # After a reset the queue is gone, and the requests of requests.seen must not look seen.
        if self.path is None or jobdir.was_set_aside(self.path, jobdir.QUEUE):
            return None
        seen = self.path / jobdir.SEEN
        return seen if seen.exists() else None

    def recover(
        self,
        name: Path | str | None,
        count: int | None,
        set_aside: Callable[[], list[str]],
    ) -> bool:
        """Set the queue of a killed run aside, and the filter, too, as the settings say.

        By default ("auto"), a filter beside a queue in memory is kept.

        Args:
            name: the filter, for people; None if there is none: then it is about the queue.
            count: requests in it, None if there is none.
            set_aside: puts the filter out of the way, and returns where it is now.

        Returns:
            Whether the filter is out of the way now.

        Raises:
            UncleanShutdownError: the settings say "stop"; all is as it was.
        """
        what = self.not_closed(name)
        self._stop_if_asked(what)
        moved = []
        # The queue first, and what bears the note last: if we die in between, the note is still
        # there, and the next run goes on with this.
        if self.path is not None:
            queue = self.path / jobdir.QUEUE
            moved += [str(jobdir.set_aside(queue))] if queue.exists() else []
        if self.on_unclean_shutdown == "keep" or (
            self.on_unclean_shutdown == "auto" and self.path is None
        ):
            self._warn_that_the_queue_is_lost(what, count, moved)
            return False
        moved += set_aside()
        logger.warning(
            "%s, so the requests that were queued then are lost but would look seen. The crawl "
            "starts over with an empty filter, and pages are crawled again rather than lost. Set "
            "aside, not deleted: %s. With SCHEDULER = 'scrapy_bloom.CrashSafeScheduler', a job "
            "survives that",
            what,
            ", ".join(moved),
        )
        self.end()
        return True

    def _warn_that_the_queue_is_lost(
        self, what: str, count: int | None, moved: Sequence[str]
    ) -> None:
        kept = f" (at least {counted(count, 'request')})" if count is not None else ""
        if self._only_crawled:
            logger.warning(
                "%s. What it had crawled is kept%s. What it had queued is crawled now wherever "
                "this run finds a link to it: list pages should be requested with "
                'meta={"bloom_filter": "run"}. (If that run had BLOOM_RECORD_ON = "scheduled", '
                "what it had queued looks seen, and is not crawled)",
                what,
                kept,
            )
            return
        logger.warning(
            "%s. What was recorded is kept%s; requests that were queued but not yet crawled at "
            "that time look seen and are not crawled%s. Set BLOOM_ON_UNCLEAN_SHUTDOWN = "
            '"reset" to crawl everything again',
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
