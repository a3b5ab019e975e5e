"""Scrapy's own fingerprints, computed faster; and those of scrapy-redis.

A crawl spends up to ten times as long on Scrapy's fingerprint of a request as on its lookup. Most
of that makes the URL canonical, which most URLs of a site are already, or but for a fragment or the
order of their parameters: one regular expression finds that out. The rest goes into a general JSON
encoder and a cache with an entry for each request object. Neither is needed here.
"""

import logging
import re
from collections.abc import Callable
from hashlib import sha1
from json.encoder import encode_basestring_ascii as json_string

from scrapy import Request
from scrapy.utils import request as scrapy_request
from scrapy.utils.request import RequestFingerprinter, RequestFingerprinterProtocol
from w3lib.url import canonicalize_url

logger = logging.getLogger(__name__)

Fingerprint = Callable[[Request], bytes]

# What w3lib leaves as it is, in all of its versions that Scrapy knows. Each part of the pattern
# begins with a character that the part before cannot have: it takes as long as the URL is.
_IN_PATH = "[/A-Za-z0-9_~!$&'()*+,:=@.-]*"
_IN_QUERY = "[A-Za-z0-9_~.+-]*"  # "+" stands for a space, and sorts as one: first
_ESCAPE = "%(?:[0189A-F][0-9A-F]|2[02F]|3[CEF]|5[CE]|60|7[BDF])"
_PORT = ":(?:[1-5][0-9]{4}|[1-9][0-9]{0,3})"
_PAIR = f"{_IN_QUERY}={_IN_QUERY}"
_match_plain = re.compile(
    rf"(https?://[a-z0-9.-]+(?:{_PORT})?)(/{_IN_PATH}(?:{_ESCAPE}{_IN_PATH})*)?"
    rf"(?:\?({_PAIR}(?:&{_PAIR})*))?(?:#[!-~]*)?"
).match
_OF_GET = b'{"body": "", "headers": {}, "method": "GET", "url": "%b"}'


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
    """Return a function that computes what Scrapy's own does.

    The fingerprint depends on body, method, URL and `verbatim_url`.
    """

    def fingerprint(request: Request) -> bytes:
        method = request.method
        if request.meta.get("verbatim_url") or type(method) is not str:
            return own(request)
        url, body = request.url, request.body
        if body or method != "GET":
            return _sha1(body.hex(), method, _canonical(url))
        return plain_fingerprint(url) or _sha1("", "GET", canonicalize_url(url))

    return fingerprint


def plain_fingerprint(url: str) -> bytes | None:
    """Return Scrapy's fingerprint of a GET without a body, where that takes no canonicalization.

    It costs a tenth of Scrapy's, or less: that depends on w3lib. The URL need not have been in a
    Request.

    Args:
        url: any.

    Returns:
        20 bytes; None if the URL is none of those that `_plain` knows.
    """
    if (canonical := _plain(url)) is None:
        return None
    return sha1(_OF_GET % canonical.encode()).digest()  # noqa: S324 - no secret


def _plain(url: str) -> str | None:
    """Return what canonicalize_url makes of a URL, where a regular expression is enough.

    It is canonical already, but perhaps for the order of its parameters and for a fragment.
    """
    parts = _match_plain(url)
    # Not by fullmatch: that goes back over all of a URL that is not plain to its end.
    if parts is None or parts.end() < len(url):
        return None
    site, path, query = parts.groups()
    if path is None:
        path = "/"
    elif "/." in path:
        return None
    if query is None:
        return f"{site}{path}"
    if "&" in query:
        # By name, then by value: what parts them sorts before all that a name may go on with.
        pairs = query.replace("=", "\0").split("&")
        pairs.sort()
        query = "&".join(pairs).replace("\0", "=")
    return f"{site}{path}?{query}"


def _canonical(url: str) -> str:
    return _plain(url) or canonicalize_url(url)


def _sha1(body: str, method: str, url: str, headers: str = '"headers": {}, ') -> bytes:
    """Return the SHA-1 of the JSON object of a request, its keys in order."""
    method, url = json_string(method), json_string(url)
    text = f'{{"body": "{body}", {headers}"method": {method}, "url": {url}}}'
    return sha1(text.encode()).digest()  # noqa: S324 - no secret


class ScrapyRedisFingerprinter:
    """The fingerprints that scrapy-redis 0.7 and later keep in Redis, which are not Scrapy's own.

    A crawl that shall find them, in a filter into which such a set was imported, needs
    REQUEST_FINGERPRINTER_CLASS = "scrapy_bloom.ScrapyRedisFingerprinter".
    """

    def fingerprint(self, request: Request) -> bytes:
        """Return the SHA-1 of the JSON object of a request's body, method and canonical URL.

        Args:
            request: any; its headers and meta do not count.

        Returns:
            20 bytes.
        """
        return _sha1(request.body.hex(), request.method, _canonical(request.url), headers="")


def _samples() -> list[Request]:
    """Return requests with all that `_plain` knows, and with what it does not."""
    escapes = "".join(f"%{code:02X}" for code in range(256))
    in_path, known = "".join(map(chr, range(33, 127))), re.compile(_ESCAPE).findall(escapes)
    return [
        Request("https://example.com"),
        Request("http://0x7f.1/"),
        Request(f"http://www.example-1.com:8080/{''.join(re.findall(_IN_PATH, in_path))}#x"),
        Request(f"https://example.com/{''.join(known)}?a-=&a=+&a.b=1&a=~&=a+_#!"),
        Request("https://example.com/a b/é?z=1&y=%zz&y=&x#part", method="post"),
        Request('https://example.com/"\\?q="', method="PUT", body=b'\x00"body"\xff'),
        Request("https://example.com/?b=2&a=1", headers={"X-Header": "1"}, cookies={"c": "1"}),
        Request("https://user:pass@EXAMPLE.com:443/%7Ehome/../", body="ü"),
        Request("data:text/plain,x"),
    ]
