"""A site that knows the hash scheme and crafts URLs gains nothing without the salt.

The attacker knows all that is published: the scheme, Scrapy's fingerprints, the settings, so the
number of blocks and hashes. With the salt as well, URLs that all fall into one block give the pages
that fall there many false positives.

With a salt of the filter's own, the same URLs do no more than any other URLs.
"""

import random
from collections.abc import Iterator, Sequence
from functools import lru_cache
from hashlib import sha1

import pytest

from scrapy_bloom.filters.hashing import block_of, make_hasher
from scrapy_bloom.filters.sizing import choose_geometry
from scrapy_bloom.generations.memory import MemoryBackend
from tests.support.backends import begun, local_backend

EXPECTED, RATE = 20_000, 1e-3
GEOMETRY = choose_geometry(EXPECTED, RATE)
LEAKED_SALT = bytes(range(100, 116))
CANDIDATES = 60_000  # URLs that the attacker tries
CRAFTED = 10_000  # of them are linked to; the rest of what is expected are honest pages
ASKED = 60_000  # pages of the shop that were never recorded


@lru_cache
def fingerprints(site: str, number: int) -> list[bytes]:
    """Return fingerprints of a site's pages: SHA-1 digests, as Scrapy's are."""
    return [sha1(b"%s %d" % (site.encode(), page)).digest() for page in range(number)]


def places(salt: bytes, of: Sequence[bytes]) -> Iterator[tuple[int, list[int]]]:
    """Yield block and bits of each fingerprint, as the attacker computes them with a salt."""
    locate = make_hasher(salt, GEOMETRY.num_hashes)
    for fingerprint in of:
        block_hash, bits = locate(fingerprint)
        yield block_of(block_hash, GEOMETRY.num_blocks), bits


def crafted_into(block: int, salt: bytes) -> list[bytes]:
    """Return the attacker's fingerprints that fall into a block under a salt.

    Of all that do, those that set the most new bits come first.
    """
    taken: list[bytes] = []
    spare: list[bytes] = []
    full: set[int] = set()
    evil = fingerprints("evil", CANDIDATES)
    for fingerprint, (where, bits) in zip(evil, places(salt, evil), strict=True):
        if where == block:
            (spare if len(full.intersection(bits)) > 5 else taken).append(fingerprint)
            full.update(bits)
    return (taken + spare)[:CRAFTED]


def crawled(salt: dict[str, bytes], evil: Sequence[bytes]) -> MemoryBackend:
    """Record honest pages, and those of the attacker; without a salt, the filter has its own."""
    backend = local_backend(None, capacity=EXPECTED, error_rate=2 * RATE, **salt)
    begun(backend, [*fingerprints("honest", EXPECTED - CRAFTED), *evil])
    assert backend.status().generations[0].geometry == GEOMETRY
    return backend


def false_positives(backend: MemoryBackend, of: Sequence[bytes]) -> int:
    """Return how many pages are reported as duplicates that were never recorded."""
    return sum(fingerprint in backend for fingerprint in of)


def at_most(rate: float, asked: int) -> float:
    """Return a number of false positives that chance exceeds once in a million times."""
    expected = rate * asked
    return expected + 5 * expected**0.5 + 5


@pytest.fixture(scope="module")
def crafted() -> list[bytes]:
    """The attacker's choice for the leaked salt."""
    found = crafted_into(0, LEAKED_SALT)
    assert len(found) > 0.6 * CRAFTED
    return found


def test_with_a_leaked_salt_crafted_urls_cause_false_positives(crafted: list[bytes]) -> None:
    """This is why a salt is secret."""
    shop = fingerprints("shop", ASKED)
    in_block = [
        page for page, (block, _) in zip(shop, places(LEAKED_SALT, shop), strict=True) if block == 0
    ]
    chosen = random.Random(1).sample(fingerprints("evil", CANDIDATES), len(crafted))
    undisturbed = crawled({"salt": LEAKED_SALT}, chosen)
    polluted = crawled({"salt": LEAKED_SALT}, crafted)
    before, after = false_positives(undisturbed, in_block), false_positives(polluted, in_block)
    assert before <= at_most(RATE, len(in_block))
    assert after > 0.05 * len(in_block)
    assert after > 20 * before
    assert false_positives(polluted, shop) > 10 * RATE * ASKED


def test_a_random_salt_keeps_the_false_positive_rate(crafted: list[bytes]) -> None:
    """With a new salt, crafted URLs are like any other URLs."""
    shop = fingerprints("shop", ASKED)
    for guess in (crafted, crafted_into(0, bytes(16))):
        attacked = crawled({}, guess)
        assert false_positives(attacked, shop) <= at_most(RATE, ASKED)
        # No block of it bears more than chance would have it.
        fills = list(attacked.live[0].filter.block_fills())
        assert max(fills) - min(fills) < 0.05
