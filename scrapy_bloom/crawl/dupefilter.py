"""Filter the duplicate requests of a crawl, as Scrapy's scheduler asks for it."""

import contextlib
import inspect
import secrets
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Protocol
from weakref import WeakKeyDictionary, WeakSet

from scrapy import Request, Spider, signals
from scrapy.crawler import Crawler
from scrapy.dupefilters import BaseDupeFilter, RFPDupeFilter
from scrapy.utils.job import job_dir
from scrapy.utils.misc import load_object
from scrapy.utils.python import global_object_name

from scrapy_bloom.crawl.door import drop_known_duplicates
from scrapy_bloom.crawl.engine import (
    START,
    command_without_crawl,
    engine_of,
    listen_to_scrapes,
    mark,
    unmark,
    watch_start,
)
from scrapy_bloom.crawl.fingerprinting import Sample, fingerprint_function
from scrapy_bloom.crawl.startup import (
    Backend,
    create_backend,
    log_and_raise,
    starts_crawl,
)
from scrapy_bloom.crawl.telemetry import Telemetry
from scrapy_bloom.exceptions import BloomError, SettingError, StorageError
from scrapy_bloom.generations.memory import MemoryBackend
from scrapy_bloom.generations.policy import Origin
from scrapy_bloom.job.jobdir import lock_job
from scrapy_bloom.queues.store import once_in
from scrapy_bloom.settings import BloomSettings


class Recorder(Protocol):
    """A queue that records requests in the step in which they enter it: `CrawlQueue`."""

    def knows(self, fingerprint: bytes, *, once: bool = False) -> bool:
        """Return whether a fingerprint is certainly recorded; with `once`, for this run."""

    def record(self, fingerprint: bytes, *, once: bool = False) -> None:
        """Record a fingerprint without a request; with `once`, for this run, too."""


class Wishes(NamedTuple):
    """How a request is filtered and recorded, as its meta says."""

    is_filtered: bool = True  # if it is recorded
    is_recorded: bool = True
    once: bool = False  # it is filtered only if it is recorded for this run


_USUAL = Wishes()
# Keys in the meta of requests about which only `request_seen`, or a spider middleware, can tell.
_SPECIAL = frozenset({"bloom_filter", "bloom_record", START, "depth_reset"})
_AGAIN = (
    'set dont_filter=True or meta={"bloom_filter": False} in requests that are crawled again, or '
    "run `scrapy bloom reset` when no crawl runs"
)
_CONSTRUCTOR = (
    ", the DUPEFILTER_CLASS, does not take or does not pass on the arguments of BloomDupeFilter: "
    "write `def __init__(self, **options): super().__init__(**options)`, and no from_crawler(), or "
    "one that begins with `new = super().from_crawler(crawler)`"
)
_FINGERPRINTS = (
    ", the DUPEFILTER_CLASS, has a method request_fingerprint(), which is not called: move it to a "
    "class with a method fingerprint(request) that returns bytes, and set "
    "REQUEST_FINGERPRINTER_CLASS to that class"
)


_FROM_SPIDER = (
    "the scheduler calls from_spider() of BloomDupeFilter, which is only for the scheduler of "
    "scrapy-redis: call from_crawler(crawler) there, or set SCHEDULER to a subclass of "
    '"scrapy_redis.scheduler.Scheduler"'
)
_SECOND = (
    "BloomDupeFilter was created twice in this crawl, perhaps by an extension, and only one can "
    "use the JOBDIR: use `scheduler.df` in place of a second one"
)
_WITH_JOB: WeakSet[Crawler] = WeakSet()  # crawlers whose filter has locked a job


class BloomDupeFilter(BaseDupeFilter):
    """A duplicate filter that is a Bloom filter, for `DUPEFILTER_CLASS` in the settings.

    The filter always filters a request that was recorded before. Like any Bloom filter, it has
    false positives: it mistakes a new request for a duplicate, so that the request is never
    crawled, with a probability of at most `BLOOM_ERROR_RATE`. If the filter itself fails, requests
    are crawled (again) rather than dropped.

    Args:
        crawler: the crawler whose requests are filtered.
        backend: keeps the filter; the caller opens it before the first request.
        settings: the BLOOM_* settings.
        queue_is_shared: whether the queue is in Redis, so that both may be lost at once.

    Raises:
        SettingError: a subclass passes the arguments of another filter's constructor.
    """

    def __new__(cls, *args: object, **options: Any) -> "BloomDupeFilter":  # noqa: PYI034 - Self is of Python 3.11
        """Raise a SettingError for a subclass that was written for another filter."""
        is_ours = False
        with contextlib.suppress(TypeError):
            inspect.signature(cls.__init__).bind(None, **options)
            is_ours = not args and "backend" in options
        if not is_ours or cls.request_fingerprint is not BloomDupeFilter.request_fingerprint:
            problem = _FINGERPRINTS if is_ours else _CONSTRUCTOR
            log_and_raise(options.get("crawler"), SettingError(global_object_name(cls) + problem))
        return super().__new__(cls)

    def __init__(
        self,
        *,
        crawler: Crawler,
        backend: Backend,
        settings: BloomSettings,
        queue_is_shared: bool = False,
    ) -> None:
        assert crawler.request_fingerprinter is not None
        self.fingerprinter = crawler.request_fingerprinter  # as RFPDupeFilter has it
        self.backend = backend
        self._run_id = secrets.token_bytes(8)  # random, as a run of Scrapy's scheduler is a process
        self.settings = settings
        self.debug = crawler.settings.getbool("DUPEFILTER_DEBUG")
        self._scrapys = RFPDupeFilter(debug=self.debug)  # logs duplicates
        self._crawler = crawler
        self._fingerprint = fingerprint_function(crawler.request_fingerprinter)
        self._sample = Sample(self._fingerprint, "")  # the stored one from `open` on
        # Of new requests, from when they are yielded until they are scheduled.
        self._fingerprints: WeakKeyDictionary[Request, bytes] = WeakKeyDictionary()
        # Records requests in the step in which they enter it; is asked instead of the filter.
        self.queue: Recorder | None = None
        # What this class answers to a subclass, and to what, while the scheduler asks the subclass.
        self._answers: list[tuple[bytes, bool]] | None = None
        self._outlives_run = settings.is_in_redis and not queue_is_shared
        # Otherwise, later runs, which may be processes, would filter their start requests.
        self._starts_in_each_run = self._outlives_run or settings.is_crash_safe
        self._telemetry = Telemetry(crawler, backend, settings, queue_is_shared=queue_is_shared)
        self.failures = self._telemetry.failures
        self._any_passed = self._is_closed = False
        self._job_lock = contextlib.ExitStack()

    @classmethod
    def from_crawler(cls, crawler: Crawler) -> "BloomDupeFilter":
        """Build the filter that the settings ask for, with its files locked and checked.

        `close` releases the lock. CrashSafeScheduler locks its job itself, and opens the filter
        with its queue.

        Raises:
            BloomError: the filter cannot be used. The error is also logged in one line that says
                what to do, because Scrapy hides the exception behind an error of its own.
        """
        return cls._built(crawler)

    @classmethod
    def from_spider(cls, spider: Spider) -> "BloomDupeFilter":
        """Build and open the filter for scrapy-redis's scheduler, which never calls `open`.

        The filter is in Redis, like the queue: at BLOOM_REDIS_URL, or on the queue's server.

        Raises:
            BloomError: the filter cannot be used. The error is also logged in one line.
        """
        crawler = spider.crawler
        classes = getattr(load_object(crawler.settings["SCHEDULER"]), "__mro__", ())
        if not any(class_.__module__.startswith("scrapy_redis") for class_ in classes):
            log_and_raise(crawler, SettingError(_FROM_SPIDER))
        new = cls._built(crawler, queue_is_shared=True)
        new.open()
        return new

    @classmethod
    def _built(cls, crawler: Crawler, *, queue_is_shared: bool = False) -> "BloomDupeFilter":
        with contextlib.ExitStack() as job_lock:
            try:
                is_crawl = starts_crawl(crawler)
                settings = BloomSettings.from_settings(
                    crawler.settings, scrapy_redis=queue_is_shared
                )
                path = None if settings.is_in_redis else job_dir(crawler.settings)
                if not is_crawl:
                    settings, queue_is_shared = BloomSettings(expected_requests=100_000), False
                    backend: Backend = MemoryBackend(settings.policy, Origin())
                else:
                    if path and not settings.is_crash_safe:
                        if crawler in _WITH_JOB:
                            raise SettingError(_SECOND)
                        _WITH_JOB.add(crawler)
                        job_lock.callback(lock_job(Path(path).absolute()).release)
                    backend = create_backend(crawler, settings)
                # Keyword arguments, so that the constructor of a subclass may take **kwargs.
                new = cls(
                    crawler=crawler,
                    backend=backend,
                    settings=settings,
                    queue_is_shared=queue_is_shared or settings.shares_queue,
                )
                # CrashSafeScheduler opens a filter that is in one file with its queue.
                if not (path and settings.is_crash_safe):
                    backend.open()
            except BloomError as error:
                log_and_raise(crawler, error)
            new._job_lock = job_lock.pop_all()
        # A subclass may have another close(), and scrapy-redis's scheduler calls none.
        crawler.signals.connect(new._close_at_the_end, signals.spider_closed)
        return new

    def request_fingerprint(self, request: Request) -> str:
        """Return the fingerprint of a request in hexadecimal digits, as RFPDupeFilter does."""
        return self._fingerprint(request).hex()

    def _refuse_set(self, *_: object) -> NoReturn:
        raise AttributeError(f"a Bloom filter has no set of fingerprints: {_AGAIN}")

    fingerprints = property(_refuse_set, _refuse_set)

    def clear(self) -> None:
        """Empty a filter in memory, or in Redis for all crawlers that share it.

        scrapy-redis calls this method to flush.

        Raises:
            AttributeError: the filter is in a job, or belongs to a queue of CrashSafeScheduler.
            StorageError: the server failed.
        """
        is_in_job = job_dir(self._crawler.settings) and not self.settings.is_in_redis
        if self.queue is not None or is_in_job:
            raise AttributeError(f"clear() is only for a filter in memory or Redis: {_AGAIN}")
        self.backend.clear()
        where = "Redis" if self.settings.is_in_redis else "memory"
        self._telemetry.logger.info("The Bloom filter in %s was cleared", where)

    def open(self) -> None:
        """Mark the filter as in use, and log its size and place."""
        if self._outlives_run or not self.settings.is_in_redis:  # else the queue has the runs
            self.backend.begin()
        self._telemetry.open()
        self._compare_sample()
        engine = engine_of(self._crawler)
        is_crawl = engine is not None and not command_without_crawl(self._crawler)
        if is_crawl and self._outlives_run:
            watch_start(engine, mark)
            listen_to_scrapes(engine, unmark)
        if is_crawl and not self.is_overridden:
            drop_known_duplicates(self._crawler, self)

    def _compare_sample(self) -> None:
        """Log a warning if requests have other fingerprints than in the crawls before."""
        self._sample = sample = Sample(self._fingerprint, self.backend.sample)
        if not sample.changed:
            return
        self._telemetry.logger.warning(
            "%d of %d requests sampled by earlier crawls have other fingerprints now, so pages "
            "like these are crawled again: REQUEST_FINGERPRINTER_CLASS, its settings or w3lib have "
            "changed. To keep what %s has recorded, stop this crawl, and undo the change",
            sample.changed,
            sample.size,
            self.backend.status().location,
        )
        self.backend.sample = str(sample)

    @property
    def is_overridden(self) -> bool:
        """Whether a subclass has its own `request_seen`."""
        return type(self).request_seen is not BloomDupeFilter.request_seen

    def decision(self, request: Request) -> tuple[bool, bool, bytes | None]:
        """Return whether a subclass filters a request, or lets it pass, and its fingerprint.

        A request passes if it is queued even if it is recorded: the subclass has not asked this
        class, or has not followed the answer, or failed. It may have asked with another request.
        """
        self._answers = answers = list[tuple[bytes, bool]]()
        try:
            is_seen = bool(self.request_seen(request))
        except Exception as error:  # noqa: BLE001 - no failure may lose a page
            self.failures.add(request, error)
            is_seen = False
        finally:
            self._answers = None
        fingerprint, answer = answers[-1] if answers else (self.fingerprint_of(request), True)
        return is_seen, not is_seen and answer, fingerprint

    def is_known(self, request: Request) -> bool:
        """Return whether `request_seen` would certainly report a request as a duplicate.

        The method asks neither a server nor a disk, records nothing, and never raises.
        """
        if request.dont_filter:
            return False
        try:
            meta = request.meta
            if meta and not _SPECIAL.isdisjoint(meta):
                return False
            fingerprint = self._fingerprint(request)
            knows = self.queue.knows if self.queue is not None else self.backend.is_duplicate
            if knows(fingerprint):
                return True
            self._fingerprints[request] = fingerprint
        except Exception:  # noqa: BLE001 - request_seen has the same failure, and logs it
            return False
        return False

    def fingerprint_of(self, request: Request) -> bytes | None:
        """Return the fingerprint of a request; None if the fingerprinter fails, which is logged."""
        try:
            fingerprint = self._fingerprints.pop(request, None) or self._fingerprint(request)
            if not isinstance(fingerprint, bytes):
                raise TypeError(f"the fingerprint is of type {type(fingerprint).__name__}")  # noqa: TRY301 - logged like the other reasons
        except Exception as error:  # noqa: BLE001 - no failure may lose a page
            self.failures.add(request, error)
            any_worked = self._any_passed or self._telemetry.filtered > 0
            self.failures.add_unfingerprinted(any_worked=any_worked)
            return None
        if self._sample.add(request):
            self.backend.sample = str(self._sample)
        return fingerprint

    def request_seen(self, request: Request) -> bool:
        """Return whether a request is a duplicate; record it if it is new.

        A request with `meta["bloom_record"] = False` is filtered, but not recorded. A request with
        `meta["bloom_filter"] = False` is recorded, but never filtered. A request with
        `meta["bloom_filter"] = "run"` is scheduled once per run.

        The method never raises, because Scrapy would lose the request. If anything fails, the
        request passes as new, and `bloom/errors` counts the failure.
        """
        if (fingerprint := self.fingerprint_of(request)) is None:
            return False
        try:
            is_seen = self._is_seen(fingerprint, self.wishes(request))
        except Exception as error:  # noqa: BLE001 - no failure may lose a page
            self.failures.add(request, error)
            return False
        if not is_seen:
            self._any_passed = True
        return is_seen

    def wishes(self, request: Request) -> Wishes:
        """Return what the meta of a request asks for."""
        meta = request.meta
        once = self._starts_in_each_run and START in meta and "bloom_filter" not in meta
        if not (once or "bloom_filter" in meta or "bloom_record" in meta):
            return _USUAL
        kind = meta.get("bloom_filter", True)
        return Wishes(bool(kind), bool(meta.get("bloom_record", True)), once or kind == "run")

    def _is_seen(self, fingerprint: bytes, wishes: Wishes) -> bool:
        """Return whether to filter a request; record it if not."""
        if self.queue is not None:
            is_known = self.queue.knows(fingerprint, once=wishes.once)
            if self._answers is not None:  # it is recorded in the step in which the request enters
                self._answers.append((fingerprint, wishes.is_filtered and is_known))
            elif wishes.is_recorded and not is_known:  # a spider or a middleware asks
                self.queue.record(fingerprint, once=wishes.once)
            return wishes.is_filtered and is_known
        add = self.backend.add
        if wishes.once and not add(once_in(self._run_id, fingerprint)):
            return True
        if not wishes.is_recorded:
            return wishes.is_filtered and not wishes.once and fingerprint in self.backend
        if add(fingerprint) or wishes.once:
            self._telemetry.count_added()
            return False
        return wishes.is_filtered

    def count_new(self, number: int) -> None:
        """Count fingerprints that the queue has recorded."""
        self._any_passed = True
        try:
            self._telemetry.count_added(number)
        except StorageError as error:
            self.failures.add("its figures", error, "the stats lack them")

    def _close_at_the_end(self, reason: str) -> None:
        BloomDupeFilter.close(self, reason)

    def close(self, reason: str) -> None:
        """Sync and close the filter, and log its last figures."""
        if self._is_closed:
            return
        self._is_closed = True
        with self._job_lock:
            try:
                self.backend.close()
            except StorageError as error:
                self.failures.add_at_the_close(error)
            self._telemetry.close(reason, any_passed=self._any_passed)

    def log(self, request: Request, spider: Spider) -> None:
        """Log and count a filtered request, with the messages of Scrapy's own filter."""
        self._scrapys.log(request, spider)
        self._telemetry.filtered += 1
