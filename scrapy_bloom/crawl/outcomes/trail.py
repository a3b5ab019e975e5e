"""The trail in a request's meta: the recorded requests that it stands for.

A page that fails is not always the request that was recorded: that may have been redirected,
replaced by a downloader middleware, and been retried after that. Scrapy copies the meta to what is
made of a request, and into its disk queue, and so the trail goes along.

Spiders copy it, too, to the requests that they make of a response. Those are told apart when they
are scheduled: see `scrapy_bloom.crawl.outcomes.observer`.
"""

from scrapy import Request

KEY = "bloom_recorded"


def extend_trail(request: Request, fingerprint: bytes) -> None:
    """Note that a request was recorded, beside what was recorded on the way to it."""
    # As text: a queue may be in JSON. A new list: the old one is that of the request before.
    request.meta[KEY] = [*request.meta.get(KEY, []), fingerprint.hex()]


def trail_of(request: Request) -> list[bytes]:
    """Return the fingerprints recorded for a request: its own, after those that became it."""
    return [bytes.fromhex(each) for each in request.meta.get(KEY, [])]
