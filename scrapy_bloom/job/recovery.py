"""Detect that the last run of a job was killed, and decide what happens to its queue and filter."""

import logging
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from scrapy_bloom.exceptions import UncleanShutdownError
from scrapy_bloom.job import jobdir
from scrapy_bloom.job.disk import check_file, replace_file, sync_tree
from scrapy_bloom.text import counted

logger = logging.getLogger(__name__)


class Damage(Enum):
    """Effect of an unclean end on the queue and the filter of a crawl."""

    NONE = 1  # both are complete
    FILTER = 2  # the filter lacks requests that were in the queue: they are crawled again
    QUEUE = 3  # the queue may lack requests that the filter has recorded
    LOST_QUEUE = 4  # Scrapy's queue is unusable, and the filter has recorded its requests


class UncleanEnd(NamedTuple):
    """Description of a run that was killed, or of a queue and a filter that do not fit."""

    what: str  # what happened, as the beginning of a sentence
    damage: Damage  # effect on the queue and the filter
    recorded: int | None = None  # requests in the filter; None if there is none, or with a log


class Job:
    """The job directory of a crawl, if it has one, wherever its filter is kept.

    Args:
        path: the job directory, locked by `lock_job`; None if the crawl has none.
        on_unclean_shutdown: BLOOM_ON_UNCLEAN_SHUTDOWN.
        only_crawled: whether BLOOM_RECORD_ON is "crawled", so that the filter holds no request
            that was only queued.
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
        self._marked_filter: str | None = None
        self._only_crawled = only_crawled

    def owns(self, directory: Path) -> bool:
        """Return whether a filter directory is the job's own, so that the job's lock covers it."""
        return self.path is not None and directory.resolve() == (self.path / "bloom").resolve()

    def begin(self, filter_id: str = "") -> None:
        """Write the in-use marker; a run that finds it knows that the last run was killed."""
        self._marked_filter = filter_id
        if self.path is not None:
            marker = f"A crawl with scrapy_bloom runs here, or was killed.\n{filter_id}\n"
            replace_file(self.path / jobdir.IN_USE, marker)

    def change_filter(self, filter_id: str) -> None:
        """Write the id of the filter that the crawl uses now into the marker, if there is one."""
        if self._marked_filter not in {None, filter_id}:
            self.begin(filter_id)

    def may_have_used(self, filter_id: str) -> bool:
        """Return whether the killed run recorded in a filter, or may have recorded in it."""
        if self.path is None:
            return False
        check_file(self.path / jobdir.IN_USE)
        try:
            _, *lines = (self.path / jobdir.IN_USE).read_text("utf-8", "replace").split("\n")
        except FileNotFoundError:
            return False
        # A line without its end is incomplete.
        return [*lines[:-1], ""][0] in {"", filter_id}

    def end(self) -> None:
        """Remove the in-use marker after a clean close; raises OSError and keeps the marker."""
        if self.path is not None:
            # Without the marker, the requests must be on the disk, and Scrapy does not sync them.
            sync_tree(self.path / jobdir.QUEUE)
            (self.path / jobdir.IN_USE).unlink(missing_ok=True)

    def was_killed(self, *, has_filter: bool) -> bool:
        """Return whether the last run of this job was killed."""
        if self.path is None:
            return False
        if (self.path / jobdir.IN_USE).exists():
            return True
        if has_filter and not (self.path / jobdir.SEEN).exists():
            return False  # only scrapy_bloom has run here, and its last run removed the marker
        # The last run may have used Scrapy's own filter, which leaves no marker.
        return not jobdir.was_closed_by_scrapy(self.path)

    def importable(self) -> Path | None:
        """Return the path of the job's requests.seen, unless its queue was set aside."""
        # Otherwise the requests of that queue would be recorded and never crawled.
        if self.path is None or jobdir.was_set_aside(self.path, jobdir.QUEUE):
            return None
        seen = self.path / jobdir.SEEN
        return seen if seen.exists() else None

    def unclean_end(
        self,
        name: Path | str | None,
        recorded: int | None,
        damage: Damage = Damage.LOST_QUEUE,
    ) -> UncleanEnd:
        """Describe the end of a run that did not close its filter or its job.

        Args:
            name: name of the filter in messages; None if there is no filter.
            recorded: number of requests in the filter; None if there is no filter.
            damage: effect on the queue and the filter.
        """
        why = "it was killed, or ran out of memory, or the machine went down"
        if name is None and self.path is not None and not (self.path / jobdir.IN_USE).exists():
            why += "; or the files were copied without their times (cp -a keeps them)"
        what = f"The last run did not close {name or self.path} ({why})"
        return UncleanEnd(what, damage, recorded)

    def starts_over(self, end: UncleanEnd, *, may_reset: bool) -> bool:
        """Return whether the crawl sets the filter aside after an unclean end.

        Args:
            end: the unclean end.
            may_reset: whether "auto" may set the filter aside.

        Raises:
            UncleanShutdownError: BLOOM_ON_UNCLEAN_SHUTDOWN is "stop".
        """
        setting, damage = self.on_unclean_shutdown, end.damage
        if setting == "stop":
            has_lost = damage is Damage.LOST_QUEUE
            raise UncleanShutdownError(f"{end.what}{_STOP_LOST if has_lost else _STOP}")
        if setting == "auto":
            return may_reset and damage in {Damage.QUEUE, Damage.LOST_QUEUE}
        return setting == "reset"

    def set_queue_aside(self) -> list[str]:
        """Rename Scrapy's queue; return its new path in a list, or [] if there is no queue."""
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
        elif end.damage is Damage.LOST_QUEUE:
            self._warn_of_lost_queue(end, moved)
        else:
            logger.warning(_GOES_ON[end.damage], end.what)

    def _warn_of_lost_queue(self, end: UncleanEnd, moved: Sequence[str]) -> None:
        kept = f" (at least {counted(end.recorded, 'request')})" if end.recorded is not None else ""
        if self._only_crawled:
            logger.warning(
                "%s. The filter keeps the requests that were crawled%s. The requests that were "
                "queued are crawled where this run finds a link to them, so request list pages "
                'with meta={"bloom_filter": "run"}. (If the last run had BLOOM_RECORD_ON = '
                '"scheduled", the filter reports its queued requests as duplicates, and they are '
                "never crawled)",
                end.what,
                kept,
            )
            return
        logger.warning(
            "%s. The filter keeps the recorded requests%s, so it reports the requests that were "
            "queued as duplicates, and they are never crawled%s. Set "
            'BLOOM_ON_UNCLEAN_SHUTDOWN = "reset" to crawl everything again',
            end.what,
            kept,
            f" (Scrapy's queue is unusable; it was set aside as {moved[0]})" if moved else "",
        )


_STOP_LOST = (
    ', and BLOOM_ON_UNCLEAN_SHUTDOWN is "stop"; set it to "reset" to set the filter aside and '
    'crawl everything again, or to "keep" to continue without the requests that were queued. '
    "Nothing was changed"
)
_STOP = (
    '; BLOOM_ON_UNCLEAN_SHUTDOWN is "stop", so nothing was changed: set it to "auto" to resume the '
    'crawl, or to "reset" to set queue and filter aside and crawl everything again'
)
_STARTS_OVER_EMPTY = (
    "%s. The crawl starts over with an empty queue and an empty filter. Set aside, not deleted: %s"
)
_STARTS_OVER = {
    Damage.LOST_QUEUE: (
        "%s, so the queued requests are lost, and the filter would report them as duplicates. The "
        "crawl starts over with an empty filter, so that pages are crawled again rather than lost. "
        "Set aside, not deleted: %s. With SCHEDULER = 'scrapy_bloom.CrashSafeScheduler', a job "
        "survives a kill"
    ),
    Damage.QUEUE: (
        "%s: requests that the queue lacks would never be crawled, because the filter reports "
        "them as duplicates. The crawl starts over with an empty filter and the requests of the "
        "queue, so that pages are crawled again rather than lost. Set aside, not deleted: %s"
    ),
}
_GOES_ON = {
    Damage.FILTER: (
        "%s. No page is lost: requests that the filter lacks are crawled again where the crawl "
        "finds a link to them"
    ),
    Damage.QUEUE: (
        "%s: requests that the queue lacks are not crawled, because the filter reports them as "
        'duplicates. To crawl everything again, set BLOOM_ON_UNCLEAN_SHUTDOWN = "reset", or start '
        "over with another JOBDIR and another BLOOM_DIR"
    ),
}
