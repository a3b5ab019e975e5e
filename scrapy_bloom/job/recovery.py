"""A crawl's job: whether its last run was killed, and what becomes of its queue and filter then."""

import logging
import time
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path

from scrapy_bloom.exceptions import StorageError, UncleanShutdownError
from scrapy_bloom.job import paths as jobdir
from scrapy_bloom.job.disk import sync_tree
from scrapy_bloom.job.sqlite_files import beside, sync_log
from scrapy_bloom.text import counted

logger = logging.getLogger(__name__)


class Verdict(Enum):
    """Fate of a job that was killed."""

    STOP = "nothing is changed, and the crawl does not begin"
    KEEP_ALL = "queue and filter are used as they are"
    KEEP_FILTER = "the queue is set aside, the filter used"
    START_OVER = "both are set aside"


# By BLOOM_ON_UNCLEAN_SHUTDOWN, for a queue that survives, one in a JOBDIR that does not, and one
# in memory.
_VERDICTS = {
    "auto": (Verdict.KEEP_ALL, Verdict.START_OVER, Verdict.KEEP_FILTER),
    "keep": (Verdict.KEEP_ALL, Verdict.KEEP_FILTER, Verdict.KEEP_FILTER),
    "reset": (Verdict.START_OVER, Verdict.START_OVER, Verdict.START_OVER),
    "stop": (Verdict.STOP, Verdict.STOP, Verdict.STOP),
}


class Job:
    """Scrapy's job directory, if the crawl has one, beside a filter wherever that is kept.

    Args:
        path: the job directory, or None.
        on_unclean_shutdown: BLOOM_ON_UNCLEAN_SHUTDOWN: with the queue, it gives the verdict.
        only_crawled: the filter holds no request that was queued only (BLOOM_RECORD_ON).
        crash_safe: its queue is that of CrashSafeScheduler, which survives a kill.
        is_locked: the crawl has taken it by `lock_job`.
    """

    def __init__(
        self,
        path: Path | None = None,
        on_unclean_shutdown: str = "keep",
        *,
        only_crawled: bool = False,
        crash_safe: bool = False,
        is_locked: bool = False,
    ) -> None:
        self.path = path
        self._is_locked = is_locked
        # Of that queue; it need not be there yet.
        self.database = database = path / jobdir.DATABASE if crash_safe and path else None
        # Since the last run, which did not end well. None: nobody knows.
        self.was_machine_restarted = path is not None and jobdir.was_machine_restarted(path)
        # Cut off, or killed while it was made. SQLite would take it for an empty one: what waited
        # there would look crawled.
        self.is_queue_lost = bool(database and database.is_file() and database.stat().st_size <= 1)
        self._noted: str | None = None
        self._judged_by_times = False
        self._only_crawled = only_crawled
        # A note without that queue is of a run under another scheduler.
        where = 0 if database and jobdir.is_database(database) else 1 if path else 2
        self._verdict = _VERDICTS[on_unclean_shutdown][where]

    def check_queue(self) -> None:
        """Raise a StorageError if the queue is lost, where other jobs may share the filter."""
        if self.is_queue_lost:
            raise StorageError(
                f"{self._what(None)}, and look seen in the filter. Restore that file; or remove it "
                "to go on without them, and give the crawl another BLOOM_REDIS_KEY if all is to be "
                "crawled again"
            )

    def has_locked(self, directory: Path) -> bool:
        """Return whether the lock of the job is that of a filter's directory, too."""
        if self.path is None or not self._is_locked:
            return False
        return directory.resolve() == (self.path / "bloom").resolve()

    def begin(self, filter_id: str = "") -> None:
        """Note that the job is in use: whoever finds the note knows that it did not end well."""
        self._noted = filter_id
        if self.path is not None:
            jobdir.set_in_use(self.path, filter_id)

    def sync_queue(self) -> None:
        """Write a queue that survives a kill to the disk, before the filter; raises OSError."""
        if self.database is not None:
            sync_log(self.database)

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
        self._stop_if_asked(self._what(None))
        if self._verdict is Verdict.KEEP_ALL:
            return
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
        *,
        is_behind_queue: bool = False,
    ) -> bool:
        """Deal with a job that was killed.

        Args:
            name: the filter, for people; None if there is none: then it is about the queue.
            count: requests in it, None if there is none.
            set_aside: puts the filter out of the way, and returns where it is now.
            is_behind_queue: nothing went into the filter before the queue was on the disk.

        Returns:
            Whether the filter is out of the way now.

        Raises:
            UncleanShutdownError: the settings say "stop"; all is as it was.
        """
        what = self._what(name)
        self._stop_if_asked(what)
        if self._verdict is Verdict.KEEP_ALL:
            self._log_that_all_is_kept(what, is_behind_queue=is_behind_queue)
            return False
        moved = []
        # The queue first, and what bears the note last: if we die in between, the note is still
        # there, and the next run goes on with this.
        if self.path is not None:
            queues = (self.path / jobdir.QUEUE, self.path / jobdir.DATABASE)
            moved += [str(jobdir.set_aside(queue)) for queue in queues if queue.exists()]
        if self._verdict is Verdict.KEEP_FILTER:
            self._warn_that_the_queue_is_lost(what, count, moved)
            return False
        moved += set_aside()
        hint = ""
        if not self.is_queue_lost:
            what += ", so the requests that were queued then are lost but would look seen"
            hint = ". With SCHEDULER = 'scrapy_bloom.CrashSafeScheduler', a job survives that"
        logger.warning(
            "%s. The crawl starts over with an empty filter, and pages are crawled again rather "
            "than lost. Set aside, not deleted: %s%s",
            what,
            ", ".join(moved),
            hint,
        )
        self.end()
        return True

    def _log_that_all_is_kept(self, what: str, *, is_behind_queue: bool) -> None:
        restarted = self.was_machine_restarted
        if restarted is False or (restarted is None and is_behind_queue):
            logger.info(
                "%s. Its queue survives that: nothing is lost, and what was under way then is "
                "crawled again",
                what,
            )
            return
        assert self.database is not None
        files = (self.database, beside(self.database)[0])
        written_at = max(file.stat().st_mtime for file in files if file.exists())
        until = "until" if restarted else "if"
        logger.warning(
            "%s. Its queue on the disk is that of %s: %s. To crawl everything again, stop this "
            "crawl and give it another JOBDIR (and another BLOOM_DIR or BLOOM_REDIS_KEY, if one is "
            "set)",
            what,
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(written_at)),
            "what was crawled after that is crawled again, and no page is lost"
            if is_behind_queue
            else f"requests recorded after that, {until} the machine went down, may look seen and "
            "be nowhere, and are not crawled",
        )

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

    def _what(self, name: Path | str | None) -> str:
        if self.is_queue_lost:
            return f"{self.database} is empty: the requests that waited there are lost"
        name = name or self.path or ""
        why = "it was killed, or ran out of memory"
        if self.was_machine_restarted is None:
            why += ", or the machine went down"
        if self.was_machine_restarted:
            why = "the machine went down, or the job was moved here from another"
        if self._judged_by_times:
            why += "; or the files were copied without their times, see docs/faq.md"
        return f"The last run did not close {name} ({why})"

    def _stop_if_asked(self, what: str) -> None:
        if self._verdict is Verdict.STOP:
            raise UncleanShutdownError(
                f'{what}, and BLOOM_ON_UNCLEAN_SHUTDOWN is "stop"; set it to "reset" to set the '
                'filter aside and crawl everything again, or to "keep" to go on without the '
                "requests that were queued at that time. Nothing was changed"
            )
