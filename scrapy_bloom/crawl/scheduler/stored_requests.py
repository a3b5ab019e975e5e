"""Turn requests into the form in which a store keeps them, and back."""

from collections.abc import Callable, Sequence
from hashlib import sha1
from typing import Any

from scrapy import Request
from scrapy.crawler import Crawler
from scrapy.pqueues import DownloaderInterface
from scrapy.utils.request import request_from_dict

from scrapy_bloom.crawl.scheduler.in_flight import Row
from scrapy_bloom.crawl.scheduler.order import order_of, serves_least_busy_slot
from scrapy_bloom.crawl.start_requests import START
from scrapy_bloom.queues.serialized import deserialized, serialized
from scrapy_bloom.queues.store import Entered, Taken

# A key next to those of `Request.to_dict`, of a retry or a redirect: fields of the row that it
# replaces.
_REPLACED = "bloom_replaced"


class StoredRequests:
    """Converts the requests of a crawl.

    Args:
        crawler: the crawler of the requests.
        fingerprint: computes the fingerprint of a request; may raise any exception.

    Attributes:
        downloader: tells the slots of the downloader; None if requests are not taken by slot.
    """

    def __init__(self, crawler: Crawler, fingerprint: Callable[[Request], bytes]) -> None:
        self._spider = crawler.spider
        self._order = order_of(crawler)
        self._fingerprint = fingerprint
        self.downloader = DownloaderInterface(crawler) if serves_least_busy_slot(crawler) else None

    def entered(
        self,
        request: Request,
        fingerprint: bytes | None = None,
        replaced: Row | None = None,
        keys: Sequence[bytes] = (),
        **more: Any,
    ) -> Entered:
        """Return a request as it enters a store; raises ValueError if it cannot be serialized.

        Args:
            request: the request.
            fingerprint: the fingerprint that is looked up and recorded.
            replaced: the row of the request in whose place it enters.
            keys: the fingerprints that it records; if it replaces a request, when it is done.
            more: further fields.
        """
        if not isinstance(request.priority, int):  # Request.from_dict would refuse it
            raise ValueError(f"the priority {request.priority!r} is not an integer")  # noqa: TRY004 - the caller handles it like the other reasons
        values = request.to_dict(spider=self._spider)
        via: tuple[bytes, ...] = ()
        if replaced is not None:
            via = self.fingerprints(replaced)
            unrecorded = (*replaced.unrecorded, *([tuple(keys)] if keys else []))
            values[_REPLACED] = (replaced.first, via, replaced.tries, unrecorded)
            if fingerprint is not None:  # other requests may be redirected to the same page
                via = (*via, fingerprint)
        elif fingerprint is not None and more.get("once"):
            via = (fingerprint,)  # the start page of a site may be such a page, and fail
        return self._as_entered(request, serialized(values), fingerprint, via=via, **more)

    def _as_entered(
        self, request: Request, data: bytes, fingerprint: bytes | None, **more: Any
    ) -> Entered:
        rank, newest_first = self._order(request)
        return Entered(
            data,
            fingerprint,
            slot=str(self.downloader.get_slot_key(request)) if self.downloader else "",
            priority=request.priority,
            rank=rank,
            newest_first=newest_first,
            **more,
        )

    def taken(self, taken: Taken) -> tuple[Request, Row]:
        """Return a request that was taken, and its row; may raise any exception."""
        values = dict(deserialized(taken.data))
        first, via, tries, unrecorded = values.pop(_REPLACED, (taken.data, (), taken.tries, ()))
        request = request_from_dict(values, spider=self._spider)
        once = START in request.meta or request.meta.get("bloom_filter") == "run"
        # A failed row may have the form of a retry: `kept` says when.
        tries = max(tries, taken.tries)
        return request, Row(taken.id, taken.data, first, via, tries, unrecorded, once)

    def kept(self, row: Row) -> tuple[Request, Entered]:
        """Return a failed request, and the form in which it is kept.

        It is the request as it first entered the queue, with its fingerprint; or as it is now, if
        the first one cannot be deserialized any more, because the spider has changed since.
        """
        data = row.first
        try:
            request = self._deserialized(data)
        except Exception:  # noqa: BLE001 - a callback that was renamed, for example
            data = row.data
            request = self._deserialized(data)
        return request, self._as_entered(request, data, self.fingerprints(row)[0])

    def fingerprints(self, row: Row) -> tuple[bytes, ...]:
        """Return the fingerprint of a row, after those of the requests in whose place it entered.

        The fingerprint is that of the stored request: a middleware may have changed the request
        since.
        """
        try:
            own = bytes(self._fingerprint(self._deserialized(row.data)))
        except Exception:  # noqa: BLE001 - the fingerprinter fails: any id of its own will do
            own = sha1(row.data, usedforsecurity=False).digest()
        return row.via if own in row.via else (*row.via, own)

    def _deserialized(self, data: bytes) -> Request:
        values = dict(deserialized(data))
        values.pop(_REPLACED, None)
        return request_from_dict(values, spider=self._spider)
