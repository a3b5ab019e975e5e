"""The textbook experiment: sets, a bitmap and Bloom filters are shown the same new URLs."""

import hashlib
import math
import sys

from bitarray import bitarray
from mmh3 import mmh3_x64_128_utupledigest

from benchmarks.shared import samples
from benchmarks.shared.report import Check, Section, Table
from scrapy_bloom import BloomFilter
from scrapy_bloom.filters.sizing import expected_false_positives
from scrapy_bloom.text import number_text, size_text

# The sizes that the published figures are for.
URLS = 100_000
BITMAP_BITS = 1_000_000
BLOOM_BITS, BLOOM_HASHES = 480_833, 3
PUBLISHED = {"bitmap": 4.83, "Bloom filter": 2.97}  # % of 100,000 new URLs
TOLERANCE = 0.3  # percentage points: more than five standard deviations of the count

SALT = b"an experiment..."  # fixed, so that each run gives the same figures


class ExactSet:
    """A set of what it is shown; of the MD5 digests if asked."""

    def __init__(self, *, digests: bool = False) -> None:
        self._digests = digests
        self._seen: set[bytes] = set()

    def add(self, url: bytes) -> bool:
        """Record a URL; True if it was new."""
        element = hashlib.md5(url).digest() if self._digests else url
        before = len(self._seen)
        self._seen.add(element)
        return len(self._seen) > before

    @property
    def nbytes(self) -> int:
        """The table and the objects in it, in bytes."""
        return sys.getsizeof(self._seen) + sum(map(sys.getsizeof, self._seen))


class ClassicFilter:
    """A Bloom filter as first published: k hashes, each anywhere in one array of m bits.

    With one hash it is the bitmap. (Source: B. H. Bloom, "Space/time trade-offs in hash coding with
    allowable errors", 1970.)
    """

    def __init__(self, num_bits: int, num_hashes: int) -> None:
        self._num_hashes = num_hashes
        self._bits = bitarray(num_bits)

    def add(self, url: bytes) -> bool:
        """Record a URL; True if at least one of its bits was not set."""
        seeds = range((self._num_hashes + 1) // 2)
        hashes = [half for seed in seeds for half in mmh3_x64_128_utupledigest(url, seed)]
        positions = [each_hash % len(self._bits) for each_hash in hashes[: self._num_hashes]]
        is_new = not self._bits[positions].all()
        self._bits[positions] = 1
        return is_new

    @property
    def nbytes(self) -> int:
        """The array, in bytes."""
        return self._bits.nbytes


def run(quick: bool) -> Section:  # noqa: FBT001 - every benchmark is called like this
    scale = 10 if quick else 1
    count, bitmap_bits, bloom_bits = URLS // scale, BITMAP_BITS // scale, BLOOM_BITS // scale
    ours = BloomFilter(count, 1e-9, salt=SALT)
    memories: dict[str, ExactSet | ClassicFilter | BloomFilter] = {
        "exact set": ExactSet(),
        "MD5 set": ExactSet(digests=True),
        "bitmap": ClassicFilter(bitmap_bits, 1),
        "Bloom filter": ClassicFilter(bloom_bits, BLOOM_HASHES),
        "scrapy_bloom": ours,
    }
    details = {
        "bitmap": f"{bitmap_bits:,} bits, 1 hash",
        "Bloom filter": f"{bloom_bits:,} bits, {BLOOM_HASHES} hashes",
        "scrapy_bloom": f"{ours.num_bits:,} bits, {ours.num_hashes} hashes",
    }
    theory = {
        "MD5 set": count * (count - 1) / 2 / 2**128,
        "bitmap": _expected(bitmap_bits, 1, count),
        "Bloom filter": _expected(bloom_bits, BLOOM_HASHES, count),
        "scrapy_bloom": expected_false_positives(ours.num_blocks, ours.num_hashes, count),
    }
    wrong = dict.fromkeys(memories, 0)
    progress = []
    for number in range(1, count + 1):
        url = samples.url(number).encode()
        for name, memory in memories.items():
            wrong[name] += not memory.add(url)  # each URL is new
        if number * 10 % count == 0:
            progress.append((f"{number:,}", *map("{:,}".format, wrong.values())))
    rows, checks = [], []
    for name, memory in memories.items():
        per_cent, published = 100 * wrong[name] / count, PUBLISHED.get(name)
        target = "0 %" if published is None else f"{published} ± {TOLERANCE} %"
        is_met = not wrong[name] if published is None else abs(per_cent - published) <= TOLERANCE
        measured = f"{number_text(per_cent)} %"
        checks.append(Check(f"new URLs mistaken for duplicates: {name}", target, measured, is_met))
        rows.append(
            (
                name,
                details.get(name, ""),
                size_text(memory.nbytes),
                f"{memory.nbytes / count:,.1f}",
                measured,
                f"{number_text(100 * theory.get(name, 0) / count)} %",
            )
        )
    return Section(
        title="The textbook experiment",
        method=(
            f"{count:,} different URLs are shown to five memories. A false positive is a new URL "
            "that a memory reports as a duplicate. The bitmap and the Bloom filter have the sizes "
            "of the published experiment, in which they mistook 4.83 % and 2.97 %. scrapy_bloom "
            "has a filter for that many requests at a false-positive rate of 1e-9. Hashes and salt "
            "are fixed, so each run gives the same figures."
        ),
        checks=checks,
        tables=[
            Table(("memory", "of", "size", "bytes per URL", "false positives", "theory"), rows),
            Table(("false positives after", *memories), progress),
        ],
    )


def _expected(num_bits: int, num_hashes: int, count: int) -> float:
    """Return the expected false positives of a classic filter while it records new URLs."""
    share = num_hashes / num_bits
    return math.fsum((-math.expm1(-share * i)) ** num_hashes for i in range(count))
