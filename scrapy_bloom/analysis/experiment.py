"""The textbook experiment: the same URLs shown to five memories, and what each gets wrong.

A URL is wrongly seen if it is new, as the exact set knows, and another memory says it is seen. Its
bytes are taken as they are. Hashes and salts are fixed, so that the same file gives the same
figures.
"""

import hashlib
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from bitarray import bitarray
from mmh3 import mmh3_x64_128_utupledigest

from scrapy_bloom.analysis.alternatives import bitmap_collisions, md5_collisions
from scrapy_bloom.exceptions import BloomError
from scrapy_bloom.filters.bloom import BloomFilter
from scrapy_bloom.filters.sizing import classic_fill_ratio, expected_false_drops

# The sizes that the published figures are for: of 100,000 URLs, 4.83 % and 2.97 %.
BITMAP_BITS = 1_000_000
BLOOM_BITS = 480_833
BLOOM_HASHES = 3

SALT = b"an experiment..."  # of our own filter, which is random in a crawl

_TELL_EVERY = 100  # URLs


class ExactSet:
    """A set of the URLs themselves."""

    def __init__(self) -> None:
        self._seen: set[bytes] = set()
        self._element_bytes = 0

    def add(self, url: bytes, /) -> bool:
        """Record a URL; True if it was new."""
        before = len(self._seen)
        self._seen.add(url)
        if len(self._seen) == before:
            return False
        self._element_bytes += sys.getsizeof(url)
        return True

    @property
    def nbytes(self) -> int:
        """The table and the objects in it, in bytes; what the allocator rounds up is not in it."""
        return sys.getsizeof(self._seen) + self._element_bytes


class Md5Set(ExactSet):
    """A set of 16-byte digests."""

    def add(self, url: bytes, /) -> bool:
        """Record a URL's digest; True if it was new."""
        return super().add(hashlib.md5(url, usedforsecurity=False).digest())


class ClassicFilter:
    """A Bloom filter as it was first published: k hashes, each anywhere in one array of m bits.

    With one hash it is the bitmap. The hashes are 64-bit halves of MurmurHash3 digests (x64, 128
    bits, A. Appleby), a seed for each two, taken modulo m: none is computed from the others.
    (Source: B. H. Bloom, "Space/time trade-offs in hash coding with allowable errors", 1970.)
    """

    def __init__(self, num_bits: int, num_hashes: int) -> None:
        self._num_bits, self._num_hashes = num_bits, num_hashes
        self._seeds = range((num_hashes + 1) // 2)
        self._buffer = bytearray((num_bits + 7) // 8)
        self._bits = bitarray(buffer=self._buffer)

    def add(self, url: bytes, /) -> bool:
        """Record a URL; True if at least one of its bits was not set."""
        hashes = [half for seed in self._seeds for half in mmh3_x64_128_utupledigest(url, seed)]
        positions = [hashed % self._num_bits for hashed in hashes[: self._num_hashes]]
        if self._bits[positions].all():
            return False
        self._bits[positions] = 1
        return True

    @property
    def nbytes(self) -> int:
        """The array, in bytes."""
        return len(self._buffer)


Memory = ExactSet | ClassicFilter | BloomFilter


class Contestant(NamedTuple):
    """One of the memories that are compared, with its name, size and kind for people.

    `theory` says of a number of different URLs how many of them it is expected to take for seen
    ones while it records them.
    """

    name: str
    details: str
    memory: Memory
    theory: Callable[[int], float]


class Row(NamedTuple):
    """Progress of the experiment, and what went wrong up to there."""

    read: int  # URLs shown, with the repeated ones
    different: int
    wrong: Sequence[int]  # of the different ones, taken for seen when new, by each contestant


def classic_false_drops(num_bits: int, num_hashes: int, count: int) -> float:
    """Return how many of n different URLs a classic filter takes for seen as it records them.

    The error rate is (1 - e^(-ki/m))^k when i different URLs were shown. Those that were wrongly
    seen count in i as well: their bits were all set before, so it is the same whether they are
    added or not. The sum over i is the integral from 0 to n, but for half a URL, as the rate rises
    evenly from 0 to at most 1. With t = 1 - e^(-ki/m), which runs to the final fill ratio T, it is

        (m/k) * integral of t^k / (1 - t) dt  =  (m/k) (T^(k+1)/(k+1) + T^(k+2)/(k+2) + ...)

    and, as all of that series from T on is -ln(1 - T) = kn/m, also n - (m/k) (T + ... + T^k/k).

    >>> round(classic_false_drops(480_833, 3, 100_000))
    2998
    >>> round(classic_false_drops(1_000_000, 1, 100_000))  # a bitmap
    4837
    """
    fill = classic_fill_ratio(num_bits, num_hashes, count)
    share = num_bits / num_hashes
    if fill > 0.9:
        # The series is slow here, and what is lost below is no small part of n any more.
        return count - share * sum(fill**j / j for j in range(1, num_hashes + 1))
    # After these terms, each less than 0.9 times the one before, the rest is below a float's
    # precision.
    return share * math.fsum(fill**j / j for j in range(num_hashes + 1, num_hashes + 401))


def contestants(
    ours: BloomFilter,
    *,
    bitmap_bits: int = BITMAP_BITS,
    bloom_bits: int = BLOOM_BITS,
    bloom_hashes: int = BLOOM_HASHES,
) -> list[Contestant]:
    """Return the five memories, all empty (`ours` under `SALT`); the first is the exact one."""
    units = "counters" if ours.geometry.is_counting else "bits"
    return [
        Contestant("exact set", "", ExactSet(), lambda _: 0.0),
        Contestant("MD5 set", "", Md5Set(), md5_collisions),
        Contestant(
            "bitmap",
            f"{bitmap_bits:,} bits, 1 hash",
            ClassicFilter(bitmap_bits, 1),
            lambda different: bitmap_collisions(different, bitmap_bits),
        ),
        Contestant(
            "Bloom filter",
            f"{bloom_bits:,} bits, {_hashes(bloom_hashes)}",
            ClassicFilter(bloom_bits, bloom_hashes),
            lambda different: classic_false_drops(bloom_bits, bloom_hashes, different),
        ),
        Contestant(
            "this package",
            f"{ours.num_bits:,} {units}, {_hashes(ours.num_hashes)}",
            ours,
            lambda different: expected_false_drops(ours.num_blocks, ours.num_hashes, different),
        ),
    ]


def _hashes(number: int) -> str:
    return "1 hash" if number == 1 else f"{number} hashes"


def compare(
    urls: Iterable[bytes],
    total: int,
    memories: Sequence[Memory],
    advance: Callable[[int], None] = lambda _: None,
) -> Iterator[Row]:
    """Show so many URLs to all memories; yield a row after each tenth, or of a few after each URL.

    The memories are empty; the first is exact, and the others are judged by it. `advance` is told
    now and then how many URLs are done. Raises BloomError if there are fewer than that.

    >>> list(compare([b"a", b"b", b"a"], 3, [ExactSet(), ClassicFilter(1, 1)]))[-1]
    Row(read=3, different=2, wrong=(0, 1))
    """
    ends = {total * tenth // 10 for tenth in range(1, 11)}
    exact, *others = [memory.add for memory in memories]
    wrong = [0] * len(others)
    read = different = 0
    for read, url in enumerate(urls, start=1):
        is_new = exact(url)
        different += is_new
        for index, add in enumerate(others):
            if not add(url) and is_new:
                wrong[index] += 1
        if read in ends:
            yield Row(read, different, (0, *wrong))
        if read % _TELL_EVERY == 0:
            advance(read)
        if read == total:
            return
    raise BloomError(
        f"the URLs ended after {read:,}, and there were {total:,} when they were counted; give a "
        "file that nothing changes meanwhile"
    )
