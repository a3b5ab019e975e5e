"""The filter that the settings of a crawl ask for, and where it is kept."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from scrapy.crawler import Crawler
from scrapy.utils.job import job_dir
from scrapy.utils.misc import load_object
from scrapy.utils.python import global_object_name

from scrapy_bloom.exceptions import SettingError, StorageError
from scrapy_bloom.files.backend import LocalBackend
from scrapy_bloom.generations.backend import Backend
from scrapy_bloom.generations.policy import Origin, Policy
from scrapy_bloom.generations.status import FilterStatus
from scrapy_bloom.job.recovery import Job
from scrapy_bloom.queues.conflicts import check_no_database
from scrapy_bloom.settings.settings import BloomSettings

if TYPE_CHECKING:
    from scrapy_bloom.redis.connection.server import RedisServer


def create_backend(
    crawler: Crawler,
    settings: BloomSettings,
) -> Backend:
    """Make the backend that a crawl's settings ask for, not yet opened.

    Raises a StorageError if the job directory is one of another scheduler. A job directory is
    locked.
    """
    path = job_dir(crawler.settings)
    spider = getattr(crawler.spider or crawler.spidercls, "name", "")
    fingerprinter = global_object_name(type(crawler.request_fingerprinter))
    crash_safe = _is_crash_safe(crawler)
    origin = Origin(salt=settings.salt, fingerprinter=fingerprinter, spider=spider)
    only_crawled = settings.record_on == "crawled"
    if settings.shares_queue and path:
        check_no_database(Path(path).absolute(), in_redis=True)
        path = None  # the job is the server's
    job = Job(
        Path(path).absolute() if path else None,
        settings.on_unclean_shutdown,
        only_crawled=only_crawled,
    )
    if job.path is not None and not crash_safe:
        check_no_database(job.path)
    if settings.backend == "redis":
        from scrapy_bloom.redis.backend import RedisBackend  # noqa: PLC0415 - for those who use it
        from scrapy_bloom.redis.shards import (  # noqa: PLC0415 - likewise
            ShardedBackend,
            shard_key,
            share_of,
        )

        key = settings.redis_key % {"spider": spider}
        if "{" in key or "}" in key:
            raise SettingError(
                f"BLOOM_REDIS_KEY makes {key!r} of the spider's name; allowed is a name without "
                'braces: set one without "%(spider)s"'
            )
        server, shards = redis_server(settings), settings.redis_shards
        share = share_of(settings.expected_requests, shards)
        parts = [
            RedisBackend(
                server,
                shard_key(key, shard),
                replace(policy_of(settings), expected=share),
                origin,
                mirror=settings.redis_mirror,
                flush=settings.redis_flush and not settings.shares_queue,  # the last worker does it
                job=job,
                shards=shards,
            )
            for shard in range(shards)
        ]
        return parts[0] if shards == 1 else ShardedBackend(parts)
    policy = policy_of(settings)
    if only_crawled:
        policy = replace(policy, error_rate=policy.error_rate / 2)
    stored = LocalBackend(
        settings.directory(path, spider),
        policy,
        origin,
        job=job,
        sync_secs=settings.sync_secs,
        claims=job.path is None,
    )
    if not only_crawled:
        return stored
    return RecordCrawled(stored, LocalBackend(None, replace(policy, on_full="grow")))


def has_log(crawler: Crawler, settings: BloomSettings) -> bool:
    """Return whether the filter has a log: the queue that CrashSafeScheduler has in the JOBDIR.

    Then the scheduler locks the job, and opens the filter.
    """
    return not settings.shares_queue and bool(job_dir(crawler.settings)) and _is_crash_safe(crawler)


def _is_crash_safe(crawler: Crawler) -> bool:
    return getattr(load_object(crawler.settings["SCHEDULER"]), "is_crash_safe", False)


def redis_server(settings: BloomSettings) -> "RedisServer":
    """Make the connection that the settings ask for; see `RedisServer`."""
    from scrapy_bloom.redis.connection.server import RedisServer  # noqa: PLC0415 - for those who use it

    assert settings.redis_url is not None
    return RedisServer(
        settings.redis_url,
        params=settings.redis_params,
        cluster=settings.redis_cluster,
        sentinel=settings.redis_sentinel,
        deadline_secs=settings.redis_deadline_secs,
    )


def policy_of(settings: BloomSettings) -> Policy:
    """Return the policy that the settings ask for."""
    return Policy(
        expected=settings.expected_requests,
        error_rate=settings.error_rate,
        on_full=settings.on_full,
        window=settings.window_secs,
    )


def backend_without_crawl(crawler: Crawler, command: str) -> Backend:
    """Make a filter in memory, not yet opened: what is tried by hand is not part of any crawl.

    Raises a StorageError if there is a JOBDIR. The command (of Scrapy) would take a paused job's
    requests. Scrapy's shell then waits for ever for its page, too: its callback gets lost in the
    disk queue.
    """
    if path := job_dir(crawler.settings):
        raise StorageError(
            f"scrapy {command} does not work with a job directory, whose requests it would take, "
            f"and this project has JOBDIR = {path!r}; start it with -s JOBDIR="
        )
    return LocalBackend(None, Policy(expected=100_000, error_rate=1e-9))


class RecordCrawled:
    """Two backends in one: new requests go into memory, crawled ones are kept for later runs.

    So neither a killed run nor a failed page leaves anything for later runs to see
    (BLOOM_RECORD_ON).

    Attributes:
        stored: what later runs will see.
        scheduled: how many requests were new in this run.
    """

    def __init__(self, stored: LocalBackend, volatile: LocalBackend) -> None:
        self.scheduled = 0
        self.stored = stored
        self._volatile = volatile
        self.forgotten = stored.forgotten
        self._once_more: set[bytes] = set()  # forgotten, and scheduled since; no more than queued
        self.begin = stored.begin
        self.keeps_newest = volatile.keeps_newest

    def open(self) -> None:
        """Open both."""
        self._volatile.open()
        self.stored.open()

    def add(self, fingerprint: bytes) -> bool:
        """Record a fingerprint for this run; True if it was new to this and all earlier ones."""
        if self.forgotten.take(fingerprint):
            self._volatile.add(fingerprint)  # if it is not there
            self._once_more.add(fingerprint)
        elif fingerprint in self.stored or not self._volatile.add(fingerprint):
            return False
        self.scheduled += 1
        return True

    def record(self, fingerprint: bytes) -> bool:
        """Record a fingerprint for later runs; True if it was not yet, or had been forgotten."""
        is_new = self.stored.add(fingerprint)
        if fingerprint in self._once_more:
            self._once_more.discard(fingerprint)
            self.stored.record_anew(fingerprint)
            return True
        return is_new

    def __contains__(self, fingerprint: bytes) -> bool:
        is_recorded = fingerprint in self.stored or fingerprint in self._volatile
        return is_recorded and fingerprint not in self.forgotten

    def status(self) -> FilterStatus:
        """Return the figures of what is stored, with the error rate of both."""
        stored, volatile = self.stored.status(), self._volatile.status()
        return replace(
            stored,
            volatile=[*stored.volatile, *volatile.volatile, *volatile.generations],
            error_rate=stored.error_rate + volatile.error_rate,
        )

    def close(self) -> None:
        """Close both; raises BloomError."""
        self._volatile.close()
        self.stored.close()
