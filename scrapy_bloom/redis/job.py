"""A job directory whose filter is shared: what its last run left in it."""

import logging
from collections.abc import Callable
from pathlib import Path

from scrapy_bloom.job.locks import Lock, lock_directory
from scrapy_bloom.job.paths import filter_files
from scrapy_bloom.job.recovery import Job
from scrapy_bloom.redis.keys.meta import Stored
from scrapy_bloom.redis.keys.store import RedisStore

logger = logging.getLogger(__name__)


class SharedJob:
    """The job directory of a crawl with a shared filter, if it has one.

    Args:
        job: the job directory.
        store: the keys of the filter.
        set_aside: puts the filter out of the way, and returns where it is now.
    """

    def __init__(self, job: Job, store: RedisStore, set_aside: Callable[[Stored], str]) -> None:
        self._job = job
        self._store = store
        self._set_aside = set_aside
        self._lock: Lock | None = None

    def lock(self) -> None:
        """Take the directory for this crawl; raises StorageError."""
        if self._job.path is not None:
            self._lock = lock_directory(self._job.path / "bloom")

    def unlock(self) -> None:
        """Leave the directory to others."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def prepare(self) -> Path | None:
        """Deal with a job that was killed, and with a queue that does not fit the filter.

        Returns:
            The requests.seen that a new filter shall begin with, None if there is none.

        Raises:
            StorageError: or one of its children: the server failed; the job was killed, and shall
                be looked at; its queue is lost.
        """
        stored = self._store.read()
        info = stored.info if stored.generations else None
        importable = self._job.importable()
        if info is None:
            self._warn_of_a_local_one()
        if not self._job.was_killed(has_filter=info is not None):
            if any(each.count for each in stored.generations):
                self._job.check_queue()
            return importable
        if info is None:
            is_away = self._job.recover(None, None, list)
        elif self._job.used(info.epoch):
            is_away = self._job.recover(
                f"the job with the filter {self._store.key!r}",
                sum(each.count for each in stored.generations),
                lambda: [self._set_aside(stored)],
            )
        else:
            self._job.drop_queue()
            is_away = True
        return None if is_away else importable

    def _warn_of_a_local_one(self) -> None:
        if self._job.path is not None and filter_files(path := self._job.path / "bloom"):
            logger.warning(
                '%s holds a filter that is not used, since BLOOM_BACKEND is "redis": what it '
                "recorded is crawled again. To go on with it, upload it first, as docs/scaling.md "
                "says",
                path,
            )
