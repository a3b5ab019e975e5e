"""Read and check the hash of a filter in Redis, which is untrusted.

`scrapy_bloom.redis.scripts` documents its fields.
"""

import json
import math
import mmap
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any, NamedTuple

from scrapy_bloom.exceptions import RefusedError, StorageError
from scrapy_bloom.filters.bloom import BloomFilter
from scrapy_bloom.filters.hashing import HASH_SCHEME, SALT_BYTES, checked_salt
from scrapy_bloom.filters.sizing import BLOCK_BYTES, MAX_SHARDS, Geometry
from scrapy_bloom.generations.policy import (
    Generation,
    Origin,
    check_asked,
    check_generation,
)
from scrapy_bloom.redis.connection.server import RedisServer
from scrapy_bloom.redis.scripts import CHUNK_BLOCKS, shard_key

FORMAT_VERSION = 1
MAX_MIRROR_BYTES = 1 << 30  # of all generations together; further generations have no mirror

_FIGURES = ("capacity", "error_rate", "created_at", "open_until")
_MOST = 1 << 63  # all integers must be smaller
_LONGEST = 1 << 16  # bytes of a field; ours have a few hundred
ID = re.compile(rb"[0-9a-f]{16}")  # of a filter, a generation or a worker
_SALT = re.compile(rb"[0-9a-f]{%d}" % (2 * SALT_BYTES))
_NUMBER = re.compile(rb"[0-9]{1,18}")
_KEYS = re.compile(rb"[0-9]{1,7}")  # the number of keys of a generation


def described(origin: Origin, shards: int = 1) -> str:
    """Return the field `filter` of a new filter."""
    return json.dumps(
        {
            "format": FORMAT_VERSION,
            "hash_scheme": HASH_SCHEME,
            "salt": checked_salt(origin.salt).hex(),
            "fingerprinter": origin.fingerprinter,
            "spider": origin.spider,
            "error_rate": origin.error_rate,
            "shards": shards,
        }
    )


@dataclass(eq=False, kw_only=True)
class RedisGeneration(Generation):
    """A generation in Redis, and its mirror in this process."""

    id: str = field(default_factory=lambda: secrets.token_hex(8))  # part of the names of its keys
    mirror: BloomFilter | None = None  # the bits known to be set

    @property
    def num_chunks(self) -> int:
        """Return how many keys hold its blocks."""
        return -(-self.geometry.num_blocks // CHUNK_BLOCKS)

    def blocks(self, chunk: int) -> range:
        """Return the blocks in one of its keys."""
        start = chunk * CHUNK_BLOCKS
        return range(start, min(start + CHUNK_BLOCKS, self.geometry.num_blocks))

    def chunk_bytes(self, chunk: int) -> int:
        """Return the length of one of its keys."""
        return len(self.blocks(chunk)) * BLOCK_BYTES

    @property
    def new_fields(self) -> dict[str, str]:
        """Return its fields of the hash when it is published; its keys still expire then."""
        return {**self.fields, f"persist:{self.id}": str(self.num_chunks)}

    @property
    def fields(self) -> dict[str, str]:
        """Return its fields of the hash."""
        content = {
            "id": self.id,
            "num_blocks": self.geometry.num_blocks,
            "num_hashes": self.geometry.num_hashes,
            **{name: getattr(self, name) for name in _FIGURES},
        }
        return {f"gen:{self.number}": json.dumps(content), f"count:{self.number}": str(self.count)}


def shard_keys(server: RedisServer, key: str) -> list[str]:
    """Return the keys of all shards of a filter; only `key` if the filter is missing or damaged."""
    text = server.send("HGET", key, "filter")
    try:
        _, shards = _description(text or b"")
    except (StorageError, ValueError, OverflowError, RecursionError):
        shards = 1
    return [shard_key(key, shard) for shard in range(shards)]


def summed(shards: Sequence[Sequence[Generation]]) -> list[Generation]:
    """Return the generations of all shards as the generations of one filter, oldest first."""
    merged = []
    for alike in zip_longest(*shards):
        found = [each.figures for each in alike if each is not None]
        blocks = sum(each.geometry.num_blocks for each in found)
        one = replace(
            found[0],
            geometry=found[0].geometry._replace(num_blocks=blocks),
            capacity=sum(each.capacity for each in found),
            error_rate=max(each.error_rate for each in found),
            count=sum(each.count for each in found),
        )
        merged.append(one)
    return merged


def add_mirrors(live: Sequence[RedisGeneration], salt: bytes, shards: int) -> None:
    """Give live generations mirrors, the newest first, within the memory for a shard."""
    used = sum(each.geometry.nbytes for each in live if each.mirror is not None)
    for each in reversed(live):
        nbytes = each.geometry.nbytes
        if each.mirror is None and used + nbytes <= MAX_MIRROR_BYTES // shards:
            used += nbytes
            each.mirror = BloomFilter.from_buffer(
                memoryview(mmap.mmap(-1, nbytes)),
                each.geometry,
                capacity=each.capacity,
                error_rate=each.error_rate,
                salt=salt,
            )


class Unfinished(NamedTuple):
    """Work left to do with the keys of a generation after a change of the generations."""

    action: str  # "persist" or "unlink"
    generation_id: str
    num_keys: int


class RedisPlace(NamedTuple):
    """Where a filter and its queue are stored."""

    server: RedisServer
    key: str  # the name of the filter's hash


@dataclass(frozen=True)
class Stored:
    """The parsed hash of a filter."""

    id: str
    version: str
    origin: Origin
    salt: bytes
    shards: int
    generations: Sequence[RedisGeneration]  # oldest first, at least one
    kept_from: float  # number of the first generation that must not end; infinite: none
    unfinished: Sequence[Unfinished]


def read_stored(server: RedisServer, key: str) -> Stored | None:
    """Return a stored filter or shard, or None; raises RefusedError if the key is not a filter."""
    what = f"the key {key!r} of {server.address}"
    raw = server.send("HGETALL", key)
    if not raw:
        return None
    try:
        return _parsed(raw)
    except StorageError as error:
        raise RefusedError(f"{what}: {error}") from None
    except ValueError as error:
        raise RefusedError(
            f"{what} is no filter of scrapy_bloom, or a damaged one ({error}); it was left as "
            "it is: set BLOOM_REDIS_KEY to another name"
        ) from None


def read_existing(server: RedisServer, key: str) -> Stored:
    """Return a stored filter or shard; raises StorageError if it is missing."""
    if (stored := read_stored(server, key)) is None:
        raise StorageError(
            f"{server.address} has no filter {key!r}; check BLOOM_REDIS_KEY, which may contain the "
            "spider's name"
        )
    return stored


def _parsed(raw: Mapping[bytes, bytes]) -> Stored:
    """Parse all fields of a hash.

    Raises:
        StorageError: the filter is of a newer format.
        ValueError: the hash is not a filter, or is damaged; the message names the field.
    """
    name, generations, unfinished = b"", [], []
    try:
        for name in (b"id", b"version"):
            check_text(ID, raw[name])
        name = b"filter"
        origin, shards = _description(raw[name])
        for name, value in raw.items():
            kind, _, rest = name.partition(b":")
            if kind == b"gen":
                generations.append(_generation(raw, parsed_whole(rest)))
            elif kind in {b"persist", b"unlink"}:
                check_text(ID, rest)
                check_text(_KEYS, value)
                unfinished.append(Unfinished(kind.decode(), rest.decode(), int(value)))
        name = b"kept"
        kept_from = math.inf if b"ended" in raw or name not in raw else parsed_whole(raw[name])
    except KeyError:
        raise ValueError(f"it has no field {name.decode()!r}") from None
    except (ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"its field {name[:60]!a}: {str(error)[:200]}") from None
    generations.sort(key=lambda each: each.number)
    numbers = [each.number for each in generations]
    if not numbers or numbers != list(range(numbers[0], numbers[-1] + 1)):
        raise ValueError(f"its generations are {numbers}")
    if len({each.id for each in generations}) < len(generations):
        raise ValueError("two of its generations have one id")
    return Stored(
        id=raw[b"id"].decode(),
        version=raw[b"version"].decode(),
        origin=origin,
        salt=checked_salt(origin.salt),
        shards=shards,
        generations=generations,
        kept_from=kept_from,
        unfinished=unfinished,
    )


def _description(text: bytes) -> tuple[Origin, int]:
    """Parse the field `filter`; return the origin and the number of shards."""
    if (version := _members(text, {"format": int})["format"]) > FORMAT_VERSION:
        raise StorageError(
            f"the filter has format version {version}, and this scrapy_bloom supports versions up "
            f"to {FORMAT_VERSION}. Upgrade scrapy_bloom to use it"
        )
    types = {"hash_scheme": int, "shards": int, "salt": str, "fingerprinter": str, "spider": str}
    found = _members(text, {**types, "error_rate": float})
    scheme, shards, salt = found.pop("hash_scheme"), found.pop("shards"), found.pop("salt")
    if version != FORMAT_VERSION or scheme != HASH_SCHEME:
        raise ValueError(f"format {version}, hash scheme {scheme}, which is unknown")
    check_text(_SALT, salt.encode())
    check_asked(found["error_rate"])
    if not 1 <= shards <= MAX_SHARDS:
        raise ValueError(f"it has {shards} shards")
    return Origin(salt=bytes.fromhex(salt), **found), shards


def _generation(raw: Mapping[bytes, bytes], number: int) -> RedisGeneration:
    types = {"id": str, "num_blocks": int, "num_hashes": int, **dict.fromkeys(_FIGURES, float)}
    found = _members(raw[b"gen:%d" % number], {**types, "capacity": int})
    check_text(ID, found["id"].encode())
    geometry = Geometry(found.pop("num_blocks"), found.pop("num_hashes"))
    count = parsed_whole(raw.get(b"count:%d" % number, b"0"))
    new = RedisGeneration(number=number, geometry=geometry, count=count, **found)
    check_generation(new)
    return new


def check_text(pattern: re.Pattern[bytes], value: bytes, what: str = "value") -> None:
    """Raise a ValueError that says what is wrong if a stored value does not match a pattern."""
    if not pattern.fullmatch(value):
        raise ValueError(f"its {what} is {value[:60]!a}")


def parsed_whole(value: bytes, what: str = "value") -> int:
    """Return a stored whole number; raises a ValueError that says what is wrong."""
    check_text(_NUMBER, value, what)
    return int(value)


def _members(text: bytes, types: Mapping[str, Any]) -> dict[str, Any]:
    """Return the known members of a JSON object, and check their types."""
    found, members = json.loads(text) if len(text) < _LONGEST else None, {}
    if not isinstance(found, dict):
        raise ValueError("it is no JSON object, or far too long")  # noqa: TRY004 - a wrong value, not a wrong argument
    for name, kind in types.items():
        value: Any = found.get(name)
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind or (kind is int and abs(value) >= _MOST):
            raise ValueError(f"{name} is {ascii(value)[:60]}")
        if kind is str:
            value.encode()  # refuses lone surrogates, which JSON may contain
        members[name] = value
    return members
