"""Compute Scrapy's fingerprints faster than Scrapy, and the fingerprints of scrapy-redis.

Scrapy spends most of the time in the canonical form of the URL. Most URLs have it already, or
differ only in a fragment or in the order of their parameters, and one regular expression recognizes
them. The rest goes into a general JSON encoder and a cache, which are not needed here.
"""

import json
import logging
import operator
import re
import string
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha1
from json.encoder import encode_basestring_ascii as json_string

from scrapy import Request
from scrapy.utils.request import RequestFingerprinter, RequestFingerprinterProtocol
from w3lib.url import canonicalize_url

logger = logging.getLogger(__name__)

Fingerprint = Callable[[Request], bytes]

# The characters that w3lib does not change, in all versions that Scrapy supports. Each part of the
# pattern begins with a character that the part before cannot contain, so that a match takes time
# proportional to the length of the URL.
_IN_PATH = "[/A-Za-z0-9_~!$&'()*+,:=@.-]*"
_IN_QUERY = "[A-Za-z0-9_~.+-]*"  # "+" stands for a space, and sorts as one: first
_ESCAPE = "%(?:[0189A-F][0-9A-F]|2[02F]|3[CEF]|5[CE]|60|7[BDF])"
_PORT = ":(?:[1-5][0-9]{4}|[1-9][0-9]{0,3})"
_PAIR = f"{_IN_QUERY}={_IN_QUERY}"
_match_plain = re.compile(
    rf"(https?://[a-z0-9.-]+(?:{_PORT})?)(/{_IN_PATH}(?:{_ESCAPE}{_IN_PATH})*)?"
    rf"(?:\?({_PAIR}(?:&{_PAIR})*))?(?:#[!-~]*)?"
).match
_MOST_SAMPLED = 20
_STORED_AT = {1, 5, _MOST_SAMPLED}  # because a server takes a few round trips
_MOST_DIGESTS = 80  # characters, 16 of each
_LONGEST_SAMPLED = 300  # characters of a URL
_LOGIN, _VALUE = re.compile(r"(?<=//)[^/?#@]*@"), re.compile(r"=[^=&;/?#]*")
_MASK = str.maketrans(
    string.digits + string.ascii_lowercase + string.ascii_uppercase, "1" * 10 + "a" * 26 + "A" * 26
)
_OF_GET = b'{"body": "", "headers": {}, "method": "GET", "url": "%b"}'


def fingerprint_function(fingerprinter: RequestFingerprinterProtocol) -> Fingerprint:
    """Return the method of a fingerprinter, or a faster function instead of Scrapy's own method."""
    own = fingerprinter.fingerprint
    if type(fingerprinter) is not RequestFingerprinter:
        return own

    def fingerprint(request: Request) -> bytes:
        method = request.method
        if request.meta.get("verbatim_url") or type(method) is not str:
            return own(request)
        url, body = request.url, request.body
        if body or method != "GET":
            return _sha1(body.hex(), method, _plain(url) or canonicalize_url(url))
        return plain_fingerprint(url) or _sha1("", "GET", canonicalize_url(url))

    if all(own(sample) == fingerprint(sample) for sample in _samples()):
        return fingerprint
    logger.info(
        "This version of Scrapy computes fingerprints in an unknown way; using its own "
        "fingerprinter, which is slower"
    )
    return own


def plain_fingerprint(url: str) -> bytes | None:
    """Return Scrapy's fingerprint of a GET without a body; None if its URL needs w3lib."""
    if (canonical := _plain(url)) is None:
        return None
    return sha1(_OF_GET % canonical.encode()).digest()  # noqa: S324 - no secret


def _plain(url: str) -> str | None:
    """Return the result of canonicalize_url, except for URLs that need more than a sort: None."""
    parts = _match_plain(url)
    # fullmatch would backtrack through a URL that does not match to its end.
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
        # Sorted by name, then by value: NUL sorts before every character of a name.
        pairs = query.replace("=", "\0").split("&")
        pairs.sort()
        query = "&".join(pairs).replace("\0", "=")
    return f"{site}{path}?{query}"


def _sha1(body: str, method: str, url: str, headers: str = '"headers": {}, ') -> bytes:
    """Return the SHA-1 of the JSON object of a request, with its keys in order."""
    method, url = json_string(method), json_string(url)
    text = f'{{"body": "{body}", {headers}"method": {method}, "url": {url}}}'
    return sha1(text.encode()).digest()  # noqa: S324 - no secret


class ScrapyRedisFingerprinter:
    """Computes the fingerprints that scrapy-redis 0.7 and later keep in Redis.

    They differ from Scrapy's fingerprints. A crawl with a filter that imported such a set needs
    REQUEST_FINGERPRINTER_CLASS = "scrapy_bloom.ScrapyRedisFingerprinter".
    """

    def fingerprint(self, request: Request) -> bytes:
        """Return the SHA-1 of the JSON object of a request's body, method and canonical URL.

        Args:
            request: any request; its headers and meta have no effect.

        Returns:
            20 bytes.
        """
        url = _plain(request.url) or canonicalize_url(request.url)
        return _sha1(request.body.hex(), request.method, url, headers="")


class Sample:
    """URLs of a filter's first requests, and their fingerprints, which show a change of the rules.

    `text` is the sample that is stored with the filter; empty if there is none.
    """

    def __init__(self, fingerprint: Fingerprint, text: str) -> None:
        self._fingerprint = fingerprint
        # The filter has the fingerprints of all rules, so the sample has digests of all, too.
        stored: list[tuple[str, str]] = []
        with suppress(ValueError, TypeError, RecursionError):  # it is damaged
            stored = [(str(url), str(digests)) for url, digests in json.loads(text)]
        del stored[_MOST_SAMPLED:]
        self._requests = [self._digested(*request) for request in stored]
        self.size = len(stored)
        # How many of them have a fingerprint that they had in no crawl before.
        self.changed = sum(map(operator.ne, stored, self._requests))

    def __str__(self) -> str:
        """Return the sample as it is stored, in at most 9,000 characters."""
        return json.dumps(self._requests)

    def add(self, request: Request) -> bool:
        """Add a request if it is one of the first; return whether to store the sample now."""
        if len(self._requests) >= _MOST_SAMPLED:
            return False
        # Without the login, and with values of the same kind of characters: they may be secret.
        url = _VALUE.sub(lambda value: value[0].translate(_MASK), _LOGIN.sub("", request.url))
        self._requests.append(self._digested(url[:_LONGEST_SAMPLED]))
        return len(self._requests) in _STORED_AT

    def _digested(self, url: str, digests: str = "") -> tuple[str, str]:
        """Return a URL and its digests, with that of its current fingerprint."""
        try:
            digest = sha1(self._fingerprint(Request(url))).hexdigest()[:16]  # noqa: S324 - no secret
        except Exception:  # noqa: BLE001 - the fingerprinter may need more than a URL
            return url, digests
        return url, digests if digest in digests else (digests + digest)[-_MOST_DIGESTS:]


def _samples() -> list[Request]:
    """Return requests with every character that `_plain` accepts, and some that it does not."""
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
