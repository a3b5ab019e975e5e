"""The trail in a request's meta: the recorded requests that it stands for.

The request that fails is not always the one that was recorded: that may have been redirected,
replaced by a downloader middleware, and retried. Scrapy copies the meta to each request that is
made of another, and into its disk queue. So the trail goes along.

Spiders copy it, too, to new requests. These are told apart when they are scheduled: see
`scrapy_bloom.crawl.outcomes.observer`.
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
