"""Backends: what each must offer, and which one the settings ask for."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from scrapy_bloom.crawl.record_crawled import RecordCrawled
from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.files.backend import LocalBackend
from scrapy_bloom.generations.forgotten import Forgotten
from scrapy_bloom.generations.status import FilterStatus
from scrapy_bloom.job.recovery import Job
from scrapy_bloom.queues.conflicts import check_no_database
from scrapy_bloom.settings.settings import BloomSettings

if TYPE_CHECKING:
    from scrapy_bloom.redis.backend import RedisBackend
    from scrapy_bloom.redis.connection.server import RedisServer


class Backend(Protocol):
    """Keeps a filter for a crawl.

    It takes fingerprints, never URLs, and is used in this order: `open`, `begin`, any number of
    `add`, `close`.
    """

    @property
    def forgotten(self) -> Forgotten:
        """Return the requests that are to be crawled again."""

    def open(self) -> None:
        """Make the filter ready, leaving what is stored as it is; raises BloomError."""

    def begin(self) -> None:
        """Begin the crawl: from now to `close`, its end counts as unclean."""

    def add(self, fingerprint: bytes) -> bool:
        """Record a fingerprint; True if it was new."""

    def forget(self, fingerprints: Sequence[bytes]) -> None:
        """Let recorded fingerprints be new once more, in this run or a later one."""

    def ended(self, fingerprints: Sequence[bytes]) -> None:
        """Note that requests were crawled: they are not forgotten, even if this run dies."""

    def __contains__(self, fingerprint: bytes) -> bool:
        """Return whether a fingerprint is recorded (or, at the error rate, seems to be)."""

    def status(self) -> FilterStatus:
        """Return the filter's figures now; after `close`, the last ones."""

    def close(self) -> None:
        """Make everything durable and end; the last call. Raises BloomError."""


def create_backend(
    settings: BloomSettings,
    *,
    job_dir: str | None,
    spider: str,
    fingerprinter: str,
    crash_safe: bool = False,
    queue_is_shared: bool = False,
) -> Backend:
    """Make the backend that the settings ask for, not yet opened.

    Args:
        settings: the BLOOM_* settings.
        job_dir: Scrapy's job directory, None without one.
        spider: the spider's name.
        fingerprinter: import path of the request fingerprinter's class.
        crash_safe: the scheduler is CrashSafeScheduler.
        queue_is_shared: the queue is in Redis, too: see `RedisBackend`.

    Raises:
        StorageError: the job directory is one of another scheduler.
    """
    only_crawled = settings.record_on == "crawled"
    job = Job(
        Path(job_dir).absolute() if job_dir else None,
        settings.on_unclean_shutdown,
        only_crawled=only_crawled,
        crash_safe=crash_safe,
    )
    if job.path is not None and not crash_safe:
        check_no_database(job.path)
    if settings.backend == "redis":
        from scrapy_bloom.redis.connection.server import RedisServer  # noqa: PLC0415 - for those who use it

        assert settings.redis_url is not None
        server = RedisServer(
            settings.redis_url,
            params=settings.redis_params,
            cluster=settings.redis_cluster,
            sentinel=settings.redis_sentinel,
            deadline_secs=settings.redis_deadline_secs,
            identified=queue_is_shared,
        )
        key = settings.redis_key % {"spider": spider}
        return redis_backend(
            settings,
            server,
            key,
            spider=spider,
            fingerprinter=fingerprinter,
            job=job,
            queue_is_shared=queue_is_shared,
            claims=job.path is None and not queue_is_shared,
        )
    if only_crawled:
        settings = replace(settings, error_rate=settings.error_rate / 2)
    stored = local_backend(
        settings,
        settings.directory(job_dir, spider),
        spider=spider,
        fingerprinter=fingerprinter,
        job=job,
        claims=job.path is None,
    )
    if not only_crawled:
        return stored
    volatile = LocalBackend(
        None,
        capacity=settings.expected_requests,
        error_rate=settings.error_rate,
        window_secs=settings.window_secs,
    )
    return RecordCrawled(stored, volatile)


def local_backend(
    settings: BloomSettings,
    directory: Path | None,
    *,
    spider: str,
    fingerprinter: str,
    job: Job,
    is_crawl: bool = True,
    claims: bool = False,
) -> LocalBackend:
    """Make a filter in a directory, with these settings; see `LocalBackend`."""
    return LocalBackend(
        directory,
        capacity=settings.expected_requests,
        error_rate=settings.error_rate,
        on_full=settings.on_full,
        window_secs=settings.window_secs,
        salt=settings.salt,
        fingerprinter=fingerprinter,
        spider=spider,
        job=job,
        sync_secs=settings.sync_secs,
        is_crawl=is_crawl,
        claims=claims,
    )


def redis_backend(
    settings: BloomSettings,
    server: "RedisServer",
    key: str,
    *,
    spider: str,
    fingerprinter: str,
    job: Job,
    queue_is_shared: bool = False,
    claims: bool = False,
) -> "RedisBackend":
    """Make a filter in Redis, with these settings; see `RedisBackend`."""
    from scrapy_bloom.redis.backend import RedisBackend  # noqa: PLC0415 - as above

    return RedisBackend(
        server,
        key,
        capacity=settings.expected_requests,
        error_rate=settings.error_rate,
        on_full=settings.on_full,
        window_secs=settings.window_secs,
        salt=settings.salt,
        fingerprinter=fingerprinter,
        spider=spider,
        mirror=settings.redis_mirror,
        queue_is_shared=queue_is_shared,
        flush=settings.redis_flush,
        job=job,
        claims=claims,
    )


def backend_without_crawl(command: str, job_dir: str | None) -> Backend:
    """Make a filter in memory, not yet opened: what is tried by hand is not part of any crawl.

    Args:
        command: of Scrapy, for example "shell".
        job_dir: Scrapy's job directory, None without one.

    Raises:
        StorageError: there is a JOBDIR. The command would take a paused job's requests. Scrapy's
            shell then waits for ever for its page, too (its callback gets lost in the disk queue).
    """
    if job_dir:
        raise StorageError(
            f"scrapy {command} does not work with a job directory, whose requests it would take, "
            f"and this project has JOBDIR = {job_dir!r}; start it with -s JOBDIR="
        )
    return LocalBackend(None, capacity=100_000, error_rate=1e-9)
