"""Building the filter that the settings of a crawl ask for."""

import logging
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from scrapy.utils.job import job_dir
from scrapy.utils.misc import load_object
from scrapy.utils.python import global_object_name

from scrapy_bloom.crawl.backends import backend_without_crawl, create_backend
from scrapy_bloom.crawl.engine import close_spider_soon, command_without_crawl
from scrapy_bloom.crawl.outcomes.observer import OutcomeObserver
from scrapy_bloom.crawl.queue_fate import QueueFate
from scrapy_bloom.crawl.start_errors import fail_at_the_start
from scrapy_bloom.crawl.this_run import ThisRun
from scrapy_bloom.exceptions import BloomError
from scrapy_bloom.redis.connection.url import without_secrets
from scrapy_bloom.settings.scrapy_redis import url_of_queue
from scrapy_bloom.settings.settings import BloomSettings

if TYPE_CHECKING:
    from scrapy.crawler import Crawler

    from scrapy_bloom.crawl.dupefilter import BloomDupeFilter

logger = logging.getLogger("scrapy_bloom.crawl.dupefilter")

_Filter = TypeVar("_Filter", bound="BloomDupeFilter")


def build(cls: type[_Filter], crawler: "Crawler", *, queue_is_shared: bool = False) -> _Filter:
    """Build a crawler's filter; raises BloomError, which is logged, and ends the crawl."""
    fingerprinter = crawler.request_fingerprinter
    assert fingerprinter is not None
    assert crawler.stats is not None
    extra = {"spider": crawler.spider}
    queue, this_run = QueueFate(), ThisRun()
    try:
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
        new = cls(
            backend,
            fingerprinter,
            stats=crawler.stats,
            settings=settings,
            queue=queue,
            this_run=this_run,
            watch=partial(OutcomeObserver, crawler, done_statuses=settings.done_statuses),
            close_spider=partial(close_spider_soon, crawler),
            debug=crawler.settings.getbool("DUPEFILTER_DEBUG"),
            spider=crawler.spider,
        )
        new._connect(crawler, is_crawl=not command)
    except BloomError as error:
        fail_at_the_start(crawler, error, logger)
    return new
