"""Contents of a filter in Redis or Valkey: its hash, and all of its keys.

    <key>                   a hash that says what the filter is:
      filter                  JSON: format, hash scheme, salt, fingerprinter, epoch, ...
      <epoch>:<n>             JSON: generation n: its id, geometry, capacity, error rate, times
      <epoch>:<n>:count       requests recorded in it
      reset                   when the filter was last removed on purpose
      queue                   id of the shared queue, if there is one: see `scrapy_bloom.queues`
      draft:<id>              JSON: keys that belong to no generation, not yet or no more
    <key>:<id>:<c>          the blocks of a generation, 127 to a key, as they are in a file; then
                            one byte whose first two bits are marks
    <key>:lock              held by the crawler that is making a generation

Names of block keys have no hash tag, so a Cluster spreads them over its masters. 127 blocks and
the marks fill an allocation of 1 MiB.

The marks: "alive" is set when the key is made, so whoever reads 0 knows that the key was lost.
"Sealed" is set in all keys of a generation before the next one is published: a crawler that still
records in the sealed one reads that in the same answer, and goes on to the next.

A new epoch is a new filter under the same name. Generations of another epoch are left over.
"""

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from scrapy_bloom.filters.bloom import BloomFilter
from scrapy_bloom.filters.hashing import HASH_SCHEME, checked_salt
from scrapy_bloom.generations.policy import Generation, Origin
from scrapy_bloom.redis.keys.bitfield import BitfieldPacker

FORMAT_VERSION = 1
RESET, QUEUE = "reset", "queue"  # fields of the hash
CHUNK_BLOCKS = 127  # of 8 KiB in one key


@dataclass(frozen=True, kw_only=True)
class FilterInfo:
    """Description that all generations of a filter share: the field `filter`."""

    salt: str  # hexadecimal
    fingerprinter: str  # import path of what makes the fingerprints
    spider: str  # for information
    created_at: float  # seconds since 1970
    error_rate: float = 0.0  # as asked for, for information; 0: not said
    epoch: str = field(default_factory=lambda: secrets.token_hex(4))  # another one: another filter
    format: int = FORMAT_VERSION
    hash_scheme: int = HASH_SCHEME

    @classmethod
    def of(cls, origin: Origin, created_at: float) -> "FilterInfo":
        """Describe a new filter, with a random salt if none was asked for."""
        return cls(
            salt=checked_salt(origin.salt).hex(),
            fingerprinter=origin.fingerprinter,
            spider=origin.spider,
            created_at=created_at,
            error_rate=origin.error_rate,
        )

    @property
    def text(self) -> str:
        """The field `filter`."""
        return json.dumps(asdict(self))


@dataclass(eq=False, kw_only=True)
class RedisGeneration(Generation):
    """A generation in Redis, and what of it is known here."""

    epoch: str = ""  # of its filter
    id: str = field(default_factory=lambda: secrets.token_hex(4))  # in the names of its keys
    mirror: BloomFilter | None = None  # the bits known to be set
    # For each block, 1 if the mirror has all of a sealed generation's bits.
    complete: bytearray = field(default_factory=bytearray)
    packers: dict[int, BitfieldPacker] = field(default_factory=dict)  # of its keys used here

    @property
    def name(self) -> str:
        """The name of its field; that of its count ends with `:count`."""
        return f"{self.epoch}:{self.number}"

    @property
    def num_chunks(self) -> int:
        """Return how many keys hold its blocks."""
        return -(-self.geometry.num_blocks // CHUNK_BLOCKS)

    def blocks(self, chunk: int) -> range:
        """Return the blocks in one of its keys."""
        start = chunk * CHUNK_BLOCKS
        return range(start, min(start + CHUNK_BLOCKS, self.geometry.num_blocks))

    def marks_at(self, chunk: int) -> int:
        """Return the number of the first mark's bit in one of its keys."""
        return len(self.blocks(chunk)) * self.geometry.block_bytes * 8

    @property
    def text(self) -> str:
        """Its field; the count has a field of its own."""
        return json.dumps(
            {
                "id": self.id,
                **{name: getattr(self.geometry, name) for name in GEOMETRY_TYPES},
                **{name: getattr(self, name) for name in FIGURE_TYPES},
            }
        )


# What the field of a generation holds beside its id.
GEOMETRY_TYPES = {"num_blocks": int, "num_hashes": int, "counter_bits": int}
FIGURE_TYPES = {"capacity": int, "error_rate": float, "created_at": float, "open_until": float}


@dataclass(frozen=True)
class Stored:
    """Content of a filter's hash."""

    info: FilterInfo | None  # None if there is no filter
    generations: Sequence[RedisGeneration]  # of its epoch, oldest first
    left_over: Sequence[RedisGeneration]  # of other epochs
    drafts: Mapping[str, tuple[int, float]]  # by their ids: how many keys, and since when
    was_reset: bool = False  # somebody removed a filter on purpose: nobody writes it back


def draft_name(generation_id: str) -> str:
    """Return the name of the field for keys of no generation."""
    return f"draft:{generation_id}"


def filter_fields(info: FilterInfo, generations: Sequence[RedisGeneration]) -> dict[str, str]:
    """Return all fields of a filter's hash, but drafts."""
    fields = {"filter": info.text}
    for each in generations:
        fields |= {each.name: each.text, f"{each.name}:count": str(each.count)}
    return fields
