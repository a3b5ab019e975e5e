"""The filter that the settings of a crawl ask for, and where it is kept."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scrapy.utils.job import job_dir
from scrapy.utils.misc import load_object
from scrapy.utils.python import global_object_name

from scrapy_bloom.crawl.engine import close_spider_soon, command_without_crawl
from scrapy_bloom.crawl.outcomes.observer import OutcomeObserver
from scrapy_bloom.crawl.queue_fate import QueueFate
from scrapy_bloom.crawl.record_crawled import RecordCrawled
from scrapy_bloom.crawl.this_run import ThisRun
from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.files.backend import LocalBackend
from scrapy_bloom.generations.backend import Backend
from scrapy_bloom.generations.policy import Origin, Policy
from scrapy_bloom.job.recovery import Job
from scrapy_bloom.queues.conflicts import check_no_database
from scrapy_bloom.redis.connection.url import without_secrets
from scrapy_bloom.settings.scrapy_redis import url_of_queue
from scrapy_bloom.settings.settings import BloomSettings

if TYPE_CHECKING:
    from scrapy.crawler import Crawler

    from scrapy_bloom.redis.connection.server import RedisServer


def filter_arguments(crawler: "Crawler", *, queue_is_shared: bool = False) -> dict[str, Any]:
    """Return the arguments of the `BloomDupeFilter` that a crawl's settings ask for.

    Args:
        crawler: the crawler that is being built.
        queue_is_shared: the queue is in Redis, too: see `RedisBackend`.

    Raises:
        BloomError: a setting is wrong, or they do not go together.
    """
    fingerprinter = crawler.request_fingerprinter
    assert fingerprinter is not None
    assert crawler.stats is not None
    extra = {"spider": crawler.spider}
    queue, this_run = QueueFate(), ThisRun()
    settings = BloomSettings.from_settings(crawler.settings)
    job = job_dir(crawler.settings)
    if command := command_without_crawl(crawler):
        settings = BloomSettings()
        backend = backend_without_crawl(command, job)
    else:
        settings.warn_of_unused(extra=extra)
        if queue_is_shared:
            queue = QueueFate(shared_at=without_secrets(url_of_queue(crawler.settings)[0]))
        else:
            queue = QueueFate.of(settings, job)
            this_run = ThisRun(
                start_requests=settings.outlives_the_run and not job,
                window=settings.window_secs,
                from_start=settings.backend == "redis" and not settings.redis_mirror,
                extra=extra,
            )
        scheduler = load_object(crawler.settings["SCHEDULER"])
        backend = create_backend(
            settings,
            job_dir=job,
            spider=getattr(crawler.spider or crawler.spidercls, "name", ""),
            fingerprinter=global_object_name(type(fingerprinter)),
            crash_safe=getattr(scheduler, "is_crash_safe", False),
            queue_is_shared=queue_is_shared,
        )
    return {
        "backend": backend,
        "fingerprinter": fingerprinter,
        "stats": crawler.stats,
        "settings": settings,
        "queue": queue,
        "this_run": this_run,
        "watch": partial(OutcomeObserver, crawler, done_statuses=settings.done_statuses),
        "close_spider": partial(close_spider_soon, crawler),
        "debug": crawler.settings.getbool("DUPEFILTER_DEBUG"),
        "spider": crawler.spider,
    }


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
    origin = Origin(salt=settings.salt, fingerprinter=fingerprinter, spider=spider)
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
        from scrapy_bloom.redis.backend import RedisBackend  # noqa: PLC0415 - for those who use it

        return RedisBackend(
            redis_server(settings, identified=queue_is_shared),
            settings.redis_key % {"spider": spider},
            policy_of(settings),
            origin,
            mirror=settings.redis_mirror,
            queue_is_shared=queue_is_shared,
            flush=settings.redis_flush,
            job=job,
            claims=job.path is None and not queue_is_shared,
        )
    policy = policy_of(settings)
    if only_crawled:
        policy = replace(policy, error_rate=policy.error_rate / 2)
    stored = LocalBackend(
        settings.directory(job_dir, spider),
        policy,
        origin,
        job=job,
        sync_secs=settings.sync_secs,
        claims=job.path is None,
    )
    if not only_crawled:
        return stored
    return RecordCrawled(stored, LocalBackend(None, replace(policy, on_full="grow")))


def redis_server(settings: BloomSettings, *, identified: bool = False) -> "RedisServer":
    """Make the connection that the settings ask for; see `RedisServer`."""
    from scrapy_bloom.redis.connection.server import RedisServer  # noqa: PLC0415 - for those who use it

    assert settings.redis_url is not None
    return RedisServer(
        settings.redis_url,
        params=settings.redis_params,
        cluster=settings.redis_cluster,
        sentinel=settings.redis_sentinel,
        deadline_secs=settings.redis_deadline_secs,
        identified=identified,
    )


def policy_of(settings: BloomSettings) -> Policy:
    """Return the policy that the settings ask for."""
    return Policy(
        expected=settings.expected_requests,
        error_rate=settings.error_rate,
        on_full=settings.on_full,
        window=settings.window_secs,
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
    return LocalBackend(None, Policy(expected=100_000, error_rate=1e-9))
