"""A site that knows the hash scheme and crafts URLs gains nothing without the salt.

The attacker knows all that is published: the scheme, Scrapy's fingerprints, the settings, so the
number of blocks and hashes. With the salt as well, URLs that all fall into one block give the pages
that fall there many false positives.

With a salt of the filter's own, the same URLs do no more than any other URLs.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache

import pytest
from scrapy import Request, Spider
from scrapy.statscollectors import DummyStatsCollector
from scrapy.utils.request import RequestFingerprinter
from scrapy.utils.test import get_crawler

from scrapy_bloom import BloomDupeFilter
from scrapy_bloom.crawl.startup import create_backend
from scrapy_bloom.filters.hashing import block_of, make_hasher
from scrapy_bloom.filters.sizing import choose_geometry
from scrapy_bloom.settings import BloomSettings

pytestmark = pytest.mark.usefixtures("reactor")

EXPECTED, RATE = 20_000, 1e-3
SETTINGS = {"BLOOM_EXPECTED_REQUESTS": EXPECTED, "BLOOM_ERROR_RATE": RATE, "BLOOM_ON_FULL": "warn"}
GEOMETRY = choose_geometry(EXPECTED, RATE)
LEAKED_SALT = bytes(range(100, 116))
CANDIDATES = 60_000  # URLs that the attacker tries
CRAFTED = 10_000  # of them are linked to; the rest of what is expected are honest pages
ASKED = 60_000  # pages of the shop that were never recorded

Filter = BloomDupeFilter


@lru_cache
def fingerprints(site: str, number: int) -> list[bytes]:
    """Return the fingerprints of a site's pages."""
    fingerprinter = RequestFingerprinter()
    return [fingerprinter.fingerprint(Request(url)) for url in urls(site, number)]


def urls(site: str, number: int) -> list[str]:
    return [f"https://{site}.example/page/{each}" for each in range(number)]


def places(salt: bytes, of: Sequence[bytes]) -> Iterator[tuple[int, list[int]]]:
    """Yield block and bits of each fingerprint, as the attacker computes them with a salt."""
    locate = make_hasher(salt, GEOMETRY.num_hashes)
    for fingerprint in of:
        block_hash, bits = locate(fingerprint)
        yield block_of(block_hash, GEOMETRY.num_blocks), bits


def crafted_into(block: int, salt: bytes) -> list[int]:
    """Return the numbers of the attacker's URLs that fall into a block under a salt.

    Of all that do, those that set the most new bits come first.
    """
    taken: list[int] = []
    spare: list[int] = []
    full: set[int] = set()
    for number, (where, bits) in enumerate(places(salt, fingerprints("evil", CANDIDATES))):
        if where == block:
            (spare if len(full.intersection(bits)) > 5 else taken).append(number)
            full.update(bits)
    return (taken + spare)[:CRAFTED]


@contextmanager
def crawled(salt: bytes | None, numbers: Sequence[int]) -> Iterator[Filter]:
    """Record honest pages, and the attacker's URLs of these numbers."""
    settings = SETTINGS | ({"BLOOM_SALT": salt.hex()} if salt else {})
    crawler = get_crawler(Spider, settings)
    crawler.stats = DummyStatsCollector(crawler)
    backend = create_backend(crawler, BloomSettings.from_settings(crawler.settings))
    backend.open()
    assert backend.status().generations[0].geometry == GEOMETRY
    dupefilter = BloomDupeFilter(crawler, backend, BloomSettings())
    dupefilter.open()
    for fingerprint in fingerprints("honest", EXPECTED - CRAFTED):
        backend.add(fingerprint)
    evil = urls("evil", CANDIDATES)
    for number in numbers:
        dupefilter.request_seen(Request(evil[number]))
    yield dupefilter
    dupefilter.close("finished")


def false_positives(dupefilter: Filter, of: Sequence[bytes]) -> int:
    """Return how many pages are reported as duplicates that were never recorded."""
    return sum(fingerprint in dupefilter.backend for fingerprint in of)


def salt_of(dupefilter: Filter) -> bytes:
    salt: bytes = dupefilter.backend.live[0].filter.salt
    return salt


def at_most(rate: float, asked: int) -> float:
    """Return a number of false positives that chance exceeds once in a million times."""
    expected = rate * asked
    return expected + 5 * expected**0.5 + 5


@pytest.fixture(scope="module")
def crafted() -> list[int]:
    """The attacker's choice for the leaked salt."""
    numbers = crafted_into(0, LEAKED_SALT)
    assert len(numbers) > 0.6 * CRAFTED
    return numbers


def test_with_a_leaked_salt_crafted_urls_cause_false_positives(crafted: list[int]) -> None:
    """This is why BLOOM_SALT must be kept secret."""
    shop = fingerprints("shop", ASKED)
    in_block = [
        page for page, (block, _) in zip(shop, places(LEAKED_SALT, shop), strict=True) if block == 0
    ]
    honest = random.Random(1).sample(range(CANDIDATES), len(crafted))
    with crawled(LEAKED_SALT, honest) as undisturbed, crawled(LEAKED_SALT, crafted) as polluted:
        before, after = false_positives(undisturbed, in_block), false_positives(polluted, in_block)
        overall = false_positives(polluted, shop)
    assert before <= at_most(RATE, len(in_block))
    assert after > 0.05 * len(in_block)
    assert after > 20 * before
    assert overall > 10 * RATE * ASKED


def test_a_random_salt_keeps_the_error_rate(crafted: list[int]) -> None:
    """With a new salt, crafted URLs are like any other URLs."""
    shop = fingerprints("shop", ASKED)
    with crawled(None, crafted) as first:
        assert false_positives(first, shop) <= at_most(RATE, ASKED)
        chosen = crafted_into(0, salt_of(first))
    for guess in (chosen, crafted_into(0, bytes(16)), crafted_into(0, b"")):
        with crawled(None, guess) as attacked:
            assert false_positives(attacked, shop) <= at_most(RATE, ASKED)
            # No block of it bears more than chance would have it.
            fills = list(attacked.backend.live[0].filter.block_fills())
            assert max(fills) - min(fills) < 0.05
