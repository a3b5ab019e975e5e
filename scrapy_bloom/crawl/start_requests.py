"""Mark the start requests of a crawl: what `start()` yielded, and what the downloader replaced.

Scrapy's own key, `is_start_request`, does not tell, because spiders copy the meta of a response to
new requests. So the mark has a key of its own. Retries and redirects copy it, and queues keep it,
but it leaves the meta before a callback or errback sees the meta.
"""

from collections.abc import Callable
from typing import Any

from scrapy import Request

from scrapy_bloom.crawl.engine import listen, watch_start

START = "bloom_start"  # a key in the meta


def mark_start_requests(engine: Any) -> None:
    """Mark the start requests of a crawl; raises a SettingError if Scrapy lacks a method."""
    watch_start(engine, mark)
    listen(engine, scraping=unmark)


def is_start_request(request: Request) -> bool:
    """Return whether a request that is about to be scheduled is a start request."""
    return START in request.meta


def mark(element: object) -> None:
    """Mark an element that start() has yielded, if it is a request."""
    if isinstance(element, Request):
        element.meta[START] = True


def unmark(request: Request, result: Any) -> Callable[[Any], None]:
    """Remove the mark of a request whose response or failure is about to be handled."""
    request.meta.pop(START, None)
    # A middleware may have assigned another request to the response.
    if (other := getattr(result, "request", None)) is not None:
        other.meta.pop(START, None)
    return lambda _: None
