"""Turn requests into the form in which a store keeps them, and back."""

from types import MethodType
from typing import Any

from scrapy import Request
from scrapy.crawler import Crawler
from scrapy.pqueues import DownloaderInterface
from scrapy.utils.request import request_from_dict

from scrapy_bloom.crawl.scheduler.order import order_of, serves_least_busy_slot
from scrapy_bloom.queues.serialized import deserialized, serialized
from scrapy_bloom.queues.store import Entered, Taken


class _Methods:
    """Has only those methods of a spider that a request names.

    For the name of a callback, Scrapy evaluates all attributes of the spider, which takes as long
    as everything else that is done with a new request.
    """

    def __init__(self, spider: object, request: Request) -> None:
        self._spider = spider
        named = (request.callback, request.errback)
        self._names = [method.__name__ for method in named if isinstance(method, MethodType)]

    def __dir__(self) -> list[str]:
        return self._names

    def __getattr__(self, name: str) -> Any:
        return getattr(self._spider, name)


class StoredRequests:
    """Converts the requests of a crawl."""

    def __init__(self, crawler: Crawler) -> None:
        self._spider = crawler.spider
        self._order = order_of(crawler)
        self._downloader = DownloaderInterface(crawler) if serves_least_busy_slot(crawler) else None

    def entered(
        self,
        request: Request,
        fingerprint: bytes | None = None,
        *,
        data: bytes | None = None,
        **more: Any,
    ) -> Entered:
        """Return a request as it enters a store; raises ValueError if it cannot be serialized.

        `data` is the request as `serialized` returns it, if it is known.
        """
        if not isinstance(request.priority, int):  # Request.from_dict would refuse it
            raise ValueError(f"the priority {request.priority!r} is not an integer")  # noqa: TRY004 - the caller handles it like the other reasons
        rank, newest_first = self._order(request)
        return Entered(
            data or serialized(self._dict_of(request)),
            fingerprint,
            slot=str(self._downloader.get_slot_key(request)) if self._downloader else "",
            priority=request.priority,
            rank=rank,
            newest_first=newest_first,
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

    def taken(self, taken: Taken) -> Request:
        """Return a request that was taken; may raise any exception."""
        return request_from_dict(dict(deserialized(taken.data)), spider=self._spider)
