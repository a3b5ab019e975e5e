"""Which recorded requests a request stands for, kept in its meta.

A page that fails is not always the request that was recorded: that may have been redirected, and
been retried after that. Scrapy copies the meta to what it makes of a request, and into its disk
queue. But spiders copy it, too, to the requests that they make of a response. So a mark says what
it belongs to: the URL at which it was made, and after how many redirects.
"""

from scrapy import Request

KEY = "bloom_recorded"


def mark(request: Request, fingerprint: bytes) -> None:
    """Note that a request was recorded, and all that was recorded on the way to it."""
    recorded = [*marked(request), fingerprint]
    request.meta[KEY] = [
        request.url,
        len(_redirects(request)),
        *(each.hex() for each in recorded),  # text: a queue may be in JSON
    ]


def marked(request: Request) -> list[bytes]:
    """The fingerprints recorded for a request: its own, and those that were redirected to it."""
    if KEY not in request.meta:
        return []
    url, number, *recorded = request.meta[KEY]
    redirects = _redirects(request)
    is_itself = request.url == url and len(redirects) == number  # or a copy, to be tried again
    was_redirected = len(redirects) > number and redirects[number] == url
    return [bytes.fromhex(each) for each in recorded] if is_itself or was_redirected else []


def _redirects(request: Request) -> list[str]:
    urls: list[str] = request.meta.get("redirect_urls", [])
    return urls
