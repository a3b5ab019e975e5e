"""Convert requests into the form in which a store keeps them, with their order, and back."""

from collections.abc import Callable
from types import MethodType
from typing import Any

from queuelib.queue import FifoDiskQueue, FifoSQLiteQueue, LifoDiskQueue, LifoSQLiteQueue
from scrapy import Request
from scrapy.core.downloader import Downloader
from scrapy.crawler import Crawler
from scrapy.pqueues import DownloaderAwarePriorityQueue, DownloaderInterface, ScrapyPriorityQueue
from scrapy.settings import BaseSettings
from scrapy.utils.httpobj import urlparse_cached
from scrapy.utils.misc import load_object
from scrapy.utils.request import request_from_dict

from scrapy_bloom.crawl.engine import engine_of
from scrapy_bloom.exceptions import SettingError
from scrapy_bloom.queues.serialized import deserialized, serialized
from scrapy_bloom.queues.store import Entered, Taken


class StoredRequests:
    """Converts the requests of a crawl."""

    def __init__(self, crawler: Crawler) -> None:
        self._spider = crawler.spider
        self._order = order_of(crawler)
        self._slot_of = _slot_function(crawler)

    def pack(self, request: Request, lookup: Entered, **more: Any) -> Entered:
        """Return a request as it enters a store; raises ValueError if it cannot be serialized.

        `lookup` has how it is filtered and recorded, and its bytes if they are known.
        """
        if not isinstance(request.priority, int):  # Request.from_dict would refuse it
            raise ValueError(f"the priority {request.priority!r} is not an integer")  # noqa: TRY004 - handled like other reasons
        rank, newest_first = self._order(request)
        return lookup._replace(
            data=lookup.data or serialized(self._dict_of(request)),
            slot=str(self._slot_of(request)),
            priority=request.priority,
            rank=rank,
            newest_first=newest_first,
            # Spider middlewares set one of these keys in what callbacks and start() yield.
            has_parent="depth" in request.meta or "is_start_request" in request.meta,
            **more,
        )

    def _dict_of(self, request: Request) -> dict[str, Any]:
        if type(request).to_dict is Request.to_dict:
            try:
                methods: Any = _Methods(self._spider, request)
                return request.to_dict(spider=methods)
            except (ValueError, AttributeError):  # a method with another name
                pass
        return request.to_dict(spider=self._spider)

    def unpack(self, taken: Taken) -> Request:
        """Return a request that was taken; may raise any exception."""
        return request_from_dict(dict(deserialized(taken.data)), spider=self._spider)


def _slot_function(crawler: Crawler) -> Callable[[Request], object]:
    if not serves_least_busy_slot(crawler):
        return lambda _: ""
    if engine_of(crawler) is not None:
        return DownloaderInterface(crawler).get_slot_key
    # A command has no downloader; this is what Scrapy's own does.
    slot = Downloader.DOWNLOAD_SLOT
    return lambda request: request.meta.get(slot) or urlparse_cached(request).hostname or ""


class _Methods:
    """Has only those methods of a spider that a request names: Scrapy evaluates all attributes."""

    def __init__(self, spider: object, request: Request) -> None:
        self._spider = spider
        named = (request.callback, request.errback)
        self._names = [method.__name__ for method in named if isinstance(method, MethodType)]

    def __dir__(self) -> list[str]:
        return self._names

    def __getattr__(self, name: str) -> Any:
        return getattr(self._spider, name)


def order_of(crawler: Crawler) -> Callable[[Request], tuple[int, bool]]:
    """Return a function that tells how Scrapy orders requests of one priority.

    The function returns a request's rank (the lowest is taken first), and whether the newest
    request of the rank is taken first. Raises a SettingError if a queue has an unknown order.
    """
    serves_least_busy_slot(crawler)  # raises an error for an unknown class
    settings, start = crawler.settings, "SCHEDULER_START_DISK_QUEUE"
    others = 0, _is_lifo(settings, "SCHEDULER_DISK_QUEUE")
    if not settings[start]:
        return lambda _: others
    starts = 1, _is_lifo(settings, start)  # after the others
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
