"""Count the requests that are being downloaded, by slot of the downloader, and limit them."""

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from scrapy.core.downloader import Downloader
from scrapy.crawler import Crawler
from scrapy.pqueues import DownloaderInterface

from scrapy_bloom.crawl.engine import count_downloads_at_once
from scrapy_bloom.queues.shares import Limit, Limits, Shares
from scrapy_bloom.queues.store import ANY_NUMBER, Taken


class ActiveDownloads(Mapping[str, int]):
    """How many downloads each slot of the downloader has, counted when it is asked for."""

    def __init__(self, downloader: DownloaderInterface, slots: Mapping[Any, Any]) -> None:
        self._downloader = downloader
        self._slots = slots

    def __getitem__(self, slot: str) -> int:
        return self._downloader.stats([slot])[0][0]

    def __iter__(self) -> Iterator[str]:
        return map(str, self._slots)

    def __len__(self) -> int:
        return len(self._slots)


class SharedDownloads:
    """The downloads of this worker, which has a share of the limit of each slot.

    A request counts from when Scrapy's downloader has it until its download has ended: not while it
    is in a downloader middleware.
    """

    def __init__(self, crawler: Crawler, limits: Limits) -> None:
        engine: Any = crawler.engine
        self.shares = Shares(limits)
        self._downloader: Downloader = engine.downloader
        count_downloads_at_once(engine)

    def is_busy(self, slot: str) -> bool:
        """Return whether a request of a slot would have to wait in the downloader."""
        share = self.shares.of(slot, time.monotonic())
        return share <= self._number(slot) or self.is_delayed(slot)

    def is_delayed(self, slot: str) -> bool:
        """Return whether requests of a slot wait in the downloader for its delay."""
        found = self._downloader.slots.get(slot)
        return bool(found and found.delay and found.queue)

    def _number(self, slot: Any) -> int:
        found = self._downloader.slots.get(slot)
        return len(found.queue) + len(found.transferring) if found else 0

    def with_those(self, taken: Iterable[Taken]) -> Counter[str]:
        """Return how many requests each slot has: downloads, and some that were taken."""
        numbers = Counter(request.slot for request in taken)
        active = self._downloader.active
        for slot in {request.meta.get(Downloader.DOWNLOAD_SLOT) for request in active}:
            numbers[str(slot)] += self._number(slot)
        return +numbers

    def limit(self, slot: str) -> None:
        """Have the downloader keep to the share of a slot, if it has one of that name."""
        share, found = self.shares.of(slot, time.monotonic()), self._downloader.slots.get(slot)
        if found is not None and share < ANY_NUMBER:
            found.concurrency = max(1, share)  # 0 would keep requests that it has already


def limits_of(crawler: Crawler) -> Limits:
    """Return the limits that Scrapy's settings and the spider set for each slot."""
    settings, spider = crawler.settings, crawler.spider
    # With CONCURRENT_REQUESTS_PER_IP, Scrapy refuses the priority queue that tells hosts apart.
    usual = settings.getint("CONCURRENT_REQUESTS_PER_DOMAIN")
    usual = getattr(spider, "max_concurrent_requests", usual)
    delay = getattr(spider, "download_delay", settings.getfloat("DOWNLOAD_DELAY")) or 0.0
    # AutoThrottle changes the delay of the worker that has the slot.
    adapts = settings.getbool("AUTOTHROTTLE_ENABLED")
    least = max(settings.getfloat("AUTOTHROTTLE_START_DELAY"), 1.0) if adapts else 0.0
    return Limits(
        Limit(int(usual), max(delay, least)),
        {
            slot: Limit(own.get("concurrency", usual), max(own.get("delay", delay), least))
            for slot, own in settings.getdict("DOWNLOAD_SLOTS").items()
        },
    )
