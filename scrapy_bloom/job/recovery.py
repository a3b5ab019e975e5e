"""A crawl's job: whether its last run was killed, and what becomes of its queue and filter then."""

import logging
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from scrapy_bloom.exceptions import UncleanShutdownError
from scrapy_bloom.job import paths as jobdir
from scrapy_bloom.job.disk import sync_tree
from scrapy_bloom.text import counted

logger = logging.getLogger(__name__)


class Damage(Enum):
    """Effect of an unclean end on the queue and the filter of a crawl.

    NONE: both are complete.
    FILTER: the filter lacks requests that the queue has had. They are crawled again.
    QUEUE: the queue may lack requests that the filter has recorded.
    LOST_QUEUE: so does Scrapy's queue, which is unusable after a kill.
    LOST_UNRECORDED: Scrapy's queue is unusable, and the filter has recorded none of its requests.
    """

    NONE = 1
    FILTER = 2
    QUEUE = 3
    LOST_QUEUE = 4
    LOST_UNRECORDED = 5


class UncleanEnd(NamedTuple):
    """The last run was killed, or its queue and its filter do not belong together.

    Attributes:
        what: what happened, as the beginning of a sentence.
        damage: what that means for the crawl.
        may_reset: with BLOOM_ON_UNCLEAN_SHUTDOWN = "auto", the filter may be set aside.
        recorded: requests in the filter; None if there is no filter, or with a log.
    """

    what: str
    damage: Damage
    may_reset: bool
    recorded: int | None = None


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
        return not jobdir.was_closed_by_scrapy(self.path)

    def importable(self) -> Path | None:
        """Return the job's requests.seen, if its queue is still there."""
        # After a reset the queue is gone: what it held must not be recorded and never crawled.
        if self.path is None or jobdir.was_set_aside(self.path, jobdir.QUEUE):
            return None
        seen = self.path / jobdir.SEEN
        return seen if seen.exists() else None

    def unclean_end(
        self,
        name: Path | str | None,
        recorded: int | None,
        damage: Damage = Damage.LOST_QUEUE,
        *,
        may_reset: bool | None = None,
    ) -> UncleanEnd:
        """Describe the end of a run that did not close its filter, or its job.

        Args:
            name: the filter, for people; None if there is none.
            recorded: requests in the filter; None if there is none.
            damage: what that means for the crawl.
            may_reset: as in `UncleanEnd`; by default, whether there is a job directory. (Without
                one, the queue was in memory, and the user wants to keep the filter.)
        """
        why = "it was killed, or ran out of memory, or the machine went down"
        if name is None and self.path is not None and not (self.path / jobdir.IN_USE).exists():
            why += "; or the files were copied without their times (cp -a keeps them)"
        what = f"The last run did not close {name or self.path} ({why})"
        if may_reset is None:
            may_reset = self.path is not None
        return UncleanEnd(what, damage, may_reset, recorded)

    def starts_over(self, end: UncleanEnd) -> bool:
        """Decide whether the filter is set aside after an unclean end.

        Raises:
            UncleanShutdownError: BLOOM_ON_UNCLEAN_SHUTDOWN is "stop".
        """
        setting, damage = self.on_unclean_shutdown, end.damage
        if setting == "stop":
            has_lost = damage in {Damage.LOST_QUEUE, Damage.LOST_UNRECORDED}
            raise UncleanShutdownError(f"{end.what}{_STOP_LOST if has_lost else _STOP}")
        if setting == "auto":
            return end.may_reset and damage in {Damage.QUEUE, Damage.LOST_QUEUE}
        return setting == "reset" and damage is not Damage.LOST_UNRECORDED

    def set_queue_aside(self) -> list[str]:
        """Rename Scrapy's queue; return its new path, or nothing if there is no queue."""
        if self.path is None or not (self.path / jobdir.QUEUE).exists():
            return []
        return [str(jobdir.set_aside(self.path / jobdir.QUEUE))]

    def log_recovery(self, end: UncleanEnd, moved: Sequence[str], *, starts_over: bool) -> None:
        """Log what an unclean end means for the crawl, and which files were set aside."""
        if starts_over:
            is_reset = self.on_unclean_shutdown == "reset" and end.damage is not Damage.LOST_QUEUE
            text = _STARTS_OVER_EMPTY if is_reset else _STARTS_OVER[end.damage]
            logger.warning(text, end.what, ", ".join(moved))
        elif end.damage is Damage.NONE:
            logger.info(
                "%s. Queue and filter are complete: nothing is lost, and the requests that were in "
                "flight are crawled again",
                end.what,
            )
        elif end.damage is Damage.LOST_UNRECORDED:
            if moved:
                logger.warning(
                    "The last run with %s was killed, and its queue is broken: it was set aside as "
                    "%s. The filter in Redis holds none of its requests, and is used as it is",
                    self.path,
                    moved[0],
                )
        elif end.damage is Damage.LOST_QUEUE:
            self._warn_of_lost_queue(end, moved)
        else:
            logger.warning(_GOES_ON[end.damage], end.what)

    def _warn_of_lost_queue(self, end: UncleanEnd, moved: Sequence[str]) -> None:
        kept = f" (at least {counted(end.recorded, 'request')})" if end.recorded is not None else ""
        if self._only_crawled:
            logger.warning(
                "%s. What it had crawled is kept%s. What it had queued is crawled now wherever "
                "this run finds a link to it: list pages should be requested with "
                'meta={"bloom_filter": "run"}. (If that run had BLOOM_RECORD_ON = "scheduled", '
                "the filter reports what it had queued as duplicates, and it is never crawled)",
                end.what,
                kept,
            )
            return
        logger.warning(
            "%s. What was recorded is kept%s, so the filter reports the requests that were queued "
            "at that time as duplicates, and they are never crawled%s. Set "
            'BLOOM_ON_UNCLEAN_SHUTDOWN = "reset" to crawl everything again',
            end.what,
            kept,
            f" (Scrapy's queue would fail now; it was set aside: {moved[0]})" if moved else "",
        )


_STOP_LOST = (
    ', and BLOOM_ON_UNCLEAN_SHUTDOWN is "stop"; set it to "reset" to set the filter aside and '
    'crawl everything again, or to "keep" to go on without the requests that were queued at that '
    "time. Nothing was changed"
)
_STOP = (
    '; BLOOM_ON_UNCLEAN_SHUTDOWN is "stop", so nothing was changed: set it to "auto" to resume the '
    'crawl, or to "reset" to set queue and filter aside and to crawl everything again'
)
_STARTS_OVER_EMPTY = (
    "%s. The crawl starts over with an empty queue and an empty filter. Set aside, not deleted: %s"
)
_STARTS_OVER = {
    Damage.LOST_QUEUE: (
        "%s, so the requests that were queued then are lost, and the filter would report them as "
        "duplicates. The crawl starts over with an empty filter, and pages are crawled again "
        "rather than lost. Set aside, not deleted: %s. With SCHEDULER = "
        "'scrapy_bloom.CrashSafeScheduler', a job survives that"
    ),
    Damage.QUEUE: (
        "%s: requests that are missing in the queue would never be crawled, since the filter "
        "reports them as duplicates. The crawl starts over with an empty filter and the requests "
        "of the queue, so pages are crawled again rather than lost. Set aside, not deleted: %s"
    ),
}
_GOES_ON = {
    Damage.FILTER: (
        "%s. No page is lost: requests that the filter lacks are crawled again where a link to "
        "them is found"
    ),
    Damage.QUEUE: (
        "%s: requests that are missing in the queue are not crawled, since the filter reports them "
        'as duplicates. To crawl everything again, set BLOOM_ON_UNCLEAN_SHUTDOWN = "reset", or '
        "start over with another JOBDIR and another BLOOM_DIR"
    ),
}
