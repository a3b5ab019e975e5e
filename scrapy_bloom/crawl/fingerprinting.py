"""Scrapy's own fingerprints, computed faster; and those of scrapy-redis.

A crawl spends ten times as long on fingerprinting a request as on looking it up. Most of that is
the canonical form of the URL. It cannot be spared for a new URL. But most links of a site are the
same navigation links on page after page: for those the fingerprint is remembered by the URL as it
stands. A fifth goes into a general JSON encoder and a cache with an entry for each request object.
Neither is needed here.
"""

import hashlib
import logging
from collections.abc import Callable
from functools import lru_cache
from json.encoder import encode_basestring_ascii as json_string

from scrapy import Request
from scrapy.utils import request as scrapy_request
from scrapy.utils.request import RequestFingerprinter, RequestFingerprinterProtocol
from w3lib.url import canonicalize_url

logger = logging.getLogger(__name__)

Fingerprint = Callable[[Request], bytes]

# The navigation of a large site many times over; and no more memory than a Bloom filter's user
# would put up with: about 350 bytes for a usual URL, 0.7 MB in all, and at most 3 MB.
REMEMBERED_URLS = 2048
LONGEST_REMEMBERED = 1024


def fingerprint_function(fingerprinter: RequestFingerprinterProtocol) -> Fingerprint:
    """Return the function that fingerprints the requests of a crawl.

    For Scrapy's own RequestFingerprinter it has the same results in less time. That is checked on
    samples now, since another version of Scrapy might compute them otherwise. For any other
    fingerprinter, a subclass too, it is that one's own method.
    """
    own = fingerprinter.fingerprint
    if type(fingerprinter) is not RequestFingerprinter or _is_patched(fingerprinter):
        return own
    fast = _fast_fingerprint(own)
    if all(own(sample) == fast(sample) for sample in _samples()):
        return fast
    logger.info("This version of Scrapy makes other fingerprints than those known; using its own")
    return own


def _is_patched(fingerprinter: RequestFingerprinter) -> bool:
    """Return whether somebody has put another function into Scrapy's class or its object."""
    functions = [RequestFingerprinter.fingerprint, *vars(fingerprinter).values()]
    return any(getattr(each, "__module__", "") != scrapy_request.__name__ for each in functions)


def _fast_fingerprint(own: Fingerprint) -> Fingerprint:
    """Return a function that computes what Scrapy's own does, and remembers plain GETs.

    The fingerprint depends on body, method, URL and `verbatim_url`: for a plain GET, on the URL
    alone.
    """
    of_get = lru_cache(REMEMBERED_URLS)(_of_get)

    def fingerprint(request: Request) -> bytes:
        method = request.method
        if request.meta.get("verbatim_url") or type(method) is not str:
            return own(request)
        url, body = request.url, request.body
        if body or method != "GET":
            return _sha1(body.hex(), method, url)
        return of_get(url) if len(url) <= LONGEST_REMEMBERED else _of_get(url)

    return fingerprint


def _of_get(url: str) -> bytes:
    return _sha1("", "GET", url)


def _sha1(body: str, method: str, url: str, headers: str = '"headers": {}, ') -> bytes:
    """Return the SHA-1 of the JSON object of a request, its keys in order."""
    method, url = json_string(method), json_string(canonicalize_url(url))
    text = f'{{"body": "{body}", {headers}"method": {method}, "url": {url}}}'
    return hashlib.sha1(text.encode()).digest()  # noqa: S324 - no secret


class ScrapyRedisFingerprinter:
    """The fingerprints that scrapy-redis 0.7 and later keep in Redis, which are not Scrapy's own.

    A crawl that shall find them, in a filter into which such a set was imported, needs
    REQUEST_FINGERPRINTER_CLASS = "scrapy_bloom.ScrapyRedisFingerprinter".
    """

    # Filters store the import path of what made their fingerprints: it stays.
    __module__ = "scrapy_bloom.fingerprinting"

    def fingerprint(self, request: Request) -> bytes:
        """Return the SHA-1 of the JSON object of a request's body, method and canonical URL.

        Args:
            request: any; its headers and meta do not count.

        Returns:
            20 bytes.
        """
        return _sha1(request.body.hex(), request.method, request.url, headers="")


def _samples() -> list[Request]:
    return [
        Request("https://example.com"),
        Request("https://example.com/a b/é?z=1&y=%zz&y=&x#part", method="post"),
        Request('https://example.com/"\\?q="', method="PUT", body=b'\x00"body"\xff'),
        Request("https://example.com/?b=2&a=1", headers={"X-Header": "1"}, cookies={"c": "1"}),
        Request("https://example.com/?b=2&a=1#x", meta={"verbatim_url": True}),
        Request("https://user:pass@EXAMPLE.com:443/%7Ehome/../", body="ü"),
        Request("data:text/plain,x"),
    ]
