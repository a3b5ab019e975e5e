"""Tell in which order Scrapy's scheduler takes requests, and from which slots."""

from collections.abc import Callable

from queuelib.queue import FifoDiskQueue, FifoSQLiteQueue, LifoDiskQueue, LifoSQLiteQueue
from scrapy import Request
from scrapy.crawler import Crawler
from scrapy.pqueues import DownloaderAwarePriorityQueue, ScrapyPriorityQueue
from scrapy.settings import BaseSettings
from scrapy.squeues import FifoMemoryQueue
from scrapy.utils.misc import load_object

from scrapy_bloom.exceptions import SettingError

Order = Callable[[Request], tuple[int, bool]]


def order_of(crawler: Crawler) -> Order:
    """Return a function that tells how Scrapy orders requests of one priority.

    The function returns a request's rank (the lowest is taken first), and whether the newest
    request of the rank is taken first. Raises a SettingError if a queue has an unknown order.
    """
    serves_least_busy_slot(crawler)  # raises an error for an unknown class
    settings, start = crawler.settings, "SCHEDULER_START_DISK_QUEUE"
    others = 0, _is_lifo(settings, "SCHEDULER_DISK_QUEUE")
    if not settings[start]:
        return lambda _: others
    starts = _start_rank(crawler), _is_lifo(settings, start)
    return lambda request: starts if request.meta.get("is_start_request") else others


def _is_lifo(settings: BaseSettings, name: str) -> bool:
    path = settings[name]
    queue = load_object(path)
    if isinstance(queue, type):
        # First, because LifoSQLiteQueue is a subclass of FifoSQLiteQueue.
        if issubclass(queue, LifoDiskQueue | LifoSQLiteQueue):
            return True
        if issubclass(queue, FifoDiskQueue | FifoSQLiteQueue):
            return False
    raise SettingError(
        f"{name} is {path!r}, whose order is unknown to CrashSafeScheduler; set "
        '"scrapy.squeues.PickleLifoDiskQueue" (newest first) or '
        '"scrapy.squeues.PickleFifoDiskQueue" (oldest first), or another disk queue of Scrapy'
    )


def _start_rank(crawler: Crawler) -> int:
    """Return 1 if start requests come after others, else -1; it depends on Scrapy's version."""
    queue = ScrapyPriorityQueue(crawler, FifoMemoryQueue, "", start_queue_cls=FifoMemoryQueue)
    queue.push(Request("data:,other"))
    queue.push(Request("data:,start", meta={"is_start_request": True}))
    first = queue.pop()
    return -1 if first is not None and first.url == "data:,start" else 1


def serves_least_busy_slot(crawler: Crawler) -> bool:
    """Return whether the least busy slot of the downloader is served first.

    Raises a SettingError if SCHEDULER_PRIORITY_QUEUE is not a class of Scrapy.
    """
    path = crawler.settings["SCHEDULER_PRIORITY_QUEUE"]
    if (queue := load_object(path)) not in (DownloaderAwarePriorityQueue, ScrapyPriorityQueue):
        raise SettingError(
            f"SCHEDULER_PRIORITY_QUEUE is {path!r}, whose order is unknown to CrashSafeScheduler; "
            'set "scrapy.pqueues.DownloaderAwarePriorityQueue" (the least busy host first) or '
            '"scrapy.pqueues.ScrapyPriorityQueue" (by priority alone)'
        )
    return queue is DownloaderAwarePriorityQueue
