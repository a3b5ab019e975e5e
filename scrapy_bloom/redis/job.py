"""A job directory whose filter is shared: what its last run left in it."""

import logging
from collections.abc import Callable
from pathlib import Path

from scrapy_bloom.job.paths import filter_files
from scrapy_bloom.job.recovery import Job
from scrapy_bloom.redis.keys.meta import Stored
from scrapy_bloom.redis.keys.store import RedisStore

logger = logging.getLogger(__name__)


def prepare_job(job: Job, store: RedisStore, set_aside: Callable[[Stored], str]) -> Path | None:
    """Deal with a job that was killed, and with a queue that does not fit the shared filter.

    Args:
        job: the job directory of the crawl, if it has one.
        store: the keys of the filter.
        set_aside: puts the filter out of the way, and returns where it is now.

    Returns:
        The requests.seen that a new filter begins with, None if there is none.

    Raises:
        StorageError: or one of its children: the server failed; the job was killed, and shall be
            looked at; its queue is lost.
    """
    stored = store.read()
    info = stored.info if stored.generations else None
    importable = job.importable()
    if info is None:
        _warn_of_a_local_one(job)
    if not job.was_killed(has_filter=info is not None):
        if any(each.count for each in stored.generations):
            job.check_queue()
        return importable
    if info is None:
        is_away = job.recover(None, None, list)
    elif job.used(info.epoch):
        is_away = job.recover(
            f"the job with the filter {store.key!r}",
            sum(each.count for each in stored.generations),
            lambda: [set_aside(stored)],
        )
    else:
        job.drop_queue()
        is_away = True
    return None if is_away else importable


def _warn_of_a_local_one(job: Job) -> None:
    if job.path is not None and filter_files(path := job.path / "bloom"):
        logger.warning(
            '%s holds a filter that is not used, since BLOOM_BACKEND is "redis": what it '
            "recorded is crawled again. To go on with it, upload it first, as docs/scaling.md "
            "says",
            path,
        )
