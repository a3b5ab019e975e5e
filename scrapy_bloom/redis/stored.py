"""Read a filter in Redis without changing it, also while crawls use it.

Its hash is untrusted, so it is checked.

`scrapy_bloom.redis.layout` documents its fields.
"""

import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from bitarray import bitarray

from scrapy_bloom.exceptions import RefusedError, StorageError
from scrapy_bloom.filters.bloom import BloomFilter
from scrapy_bloom.filters.hashing import (
    HASH_SCHEME,
    SALT_BYTES,
    block_of,
    checked_salt,
    make_hasher,
)
from scrapy_bloom.filters.sizing import BLOCK_BITS, BLOCK_BYTES, Geometry, block_fills
from scrapy_bloom.generations.policy import (
    Generation,
    Origin,
    check_asked,
    check_generation,
)
from scrapy_bloom.redis.connection.server import RedisServer
from scrapy_bloom.redis.layout import CHUNK_BLOCKS, bitmap_key, block_key

FORMAT_VERSION = 1

_FIGURES = ("capacity", "error_rate", "first_run", "last_run")
_MOST = 1 << 63  # all integers must be smaller
_LONGEST = 1 << 16  # bytes of a field; ours have a few hundred
ID = re.compile(rb"[0-9a-f]{16}")  # of a filter, a generation or a worker
_SALT = re.compile(rb"[0-9a-f]{%d}" % (2 * SALT_BYTES))
_NUMBER = re.compile(rb"[0-9]{1,18}")


def described(origin: Origin) -> str:
    """Return the field `filter` of a new filter."""
    return json.dumps(
        {
            "format": FORMAT_VERSION,
            "hash_scheme": HASH_SCHEME,
            "salt": checked_salt(origin.salt).hex(),
            "fingerprinter": origin.fingerprinter,
            "spider": origin.spider,
            "error_rate": origin.error_rate,
        }
    )


@dataclass(eq=False, kw_only=True)
class RedisGeneration(Generation):
    """A generation in Redis, and its mirror in this process."""

    id: str = field(default_factory=lambda: secrets.token_hex(8))  # part of the names of its keys
    mirror: BloomFilter | None = None  # the bits known to be set
    made: set[int] = field(default_factory=set)  # numbers of keys known to be made

    @property
    def num_chunks(self) -> int:
        """Return how many keys hold its blocks."""
        return -(-self.geometry.num_blocks // CHUNK_BLOCKS)

    def chunk_of(self, block_hash: int) -> int:
        """Return the number of the key that has the block of a fingerprint."""
        return block_of(block_hash, self.geometry.num_blocks) // CHUNK_BLOCKS

    def chunk_bytes(self, chunk: int) -> int:
        """Return the length of one of its keys."""
        rest = self.geometry.num_blocks - chunk * CHUNK_BLOCKS
        return min(rest, CHUNK_BLOCKS) * BLOCK_BYTES

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


@dataclass(frozen=True)
class Stored:
    """The parsed hash of a filter."""

    id: str
    version: str
    origin: Origin
    salt: bytes
    generations: Sequence[RedisGeneration]  # oldest first, at least one
    unlinked: Sequence[str]  # ids of expired generations whose keys are left
    workers: Mapping[str, int]  # fields of workers without a queue, and when they began
    sample: str = ""


def read_stored(server: RedisServer, key: str, *, may_be_copied: bool = False) -> Stored | None:
    """Return a stored filter, or None; raises RefusedError if the key is not a filter.

    Raises a StorageError if `scrapy bloom copy` is still writing the filter, unless that is
    allowed.
    """
    what = f"the key {key!r} of {server.address}"
    raw = server.send("HGETALL", key)
    if not raw:
        return None
    if b"copying" in raw and not may_be_copied:
        raise StorageError(
            f"{what} is a copy that is not complete; wait until `scrapy bloom copy` has ended, or "
            "if it was killed, remove the copy with `scrapy bloom reset`"
        )
    try:
        return _parsed(raw)
    except StorageError as error:
        raise RefusedError(f"{what}: {error}") from None
    except ValueError as error:
        raise RefusedError(
            f"{what} is not a filter of scrapy_bloom, or is damaged ({error}); it was left as "
            "it is: set BLOOM_REDIS_KEY to another name"
        ) from None


def read_existing(server: RedisServer, key: str, *, may_be_copied: bool = False) -> Stored:
    """Return a stored filter, as `read_stored`; raises StorageError if it is missing."""
    if (stored := read_stored(server, key, may_be_copied=may_be_copied)) is None:
        raise StorageError(
            f"{server.address} has no filter {key!r}; check BLOOM_REDIS_KEY, which may contain the "
            "spider's name"
        )
    return stored


def filters_on(server: RedisServer) -> list[str]:
    """Return the names of the filters of a server, by the bitmaps of their generations."""
    pattern = "{*}:blocks:*:made"
    found = server.call(lambda client: set(client.scan_iter(match=pattern, count=1000)))
    names = {name.decode(errors="replace").partition("}")[0][1:] for name in found}
    return sorted(names)


def _parsed(raw: Mapping[bytes, bytes]) -> Stored:
    """Parse all fields of a hash.

    Raises:
        StorageError: the filter is of a newer format.
        ValueError: the hash is not a filter, or is damaged; the message names the field.
    """
    name, generations, unlinked, workers = b"", [], [], {}
    try:
        for name in (b"id", b"version"):
            check_text(ID, raw[name])
        name = b"filter"
        origin = _description(raw[name])
        for name in raw:
            kind, _, rest = name.partition(b":")
            if kind == b"gen":
                generations.append(_generation(raw, parsed_whole(rest)))
            elif kind == b"unlink":
                check_text(ID, rest)
                unlinked.append(rest.decode())
            elif kind == b"seen":
                workers[name.decode()] = parsed_whole(rest.partition(b":")[0])
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
        generations=generations,
        unlinked=unlinked,
        workers=workers,
        sample=raw.get(b"sample", b"")[:_LONGEST].decode(errors="replace"),
    )


def _description(text: bytes) -> Origin:
    """Parse the field `filter`."""
    if (version := _members(text, {"format": int})["format"]) > FORMAT_VERSION:
        raise StorageError(
            f"the filter has format version {version}, and this scrapy_bloom supports versions up "
            f"to {FORMAT_VERSION}. Upgrade scrapy_bloom to use it"
        )
    types = {"hash_scheme": int, "salt": str, "fingerprinter": str, "spider": str}
    found = _members(text, {**types, "error_rate": float})
    scheme, salt = found.pop("hash_scheme"), found.pop("salt")
    if version != FORMAT_VERSION or scheme != HASH_SCHEME:
        raise ValueError(f"format {version}, hash scheme {scheme}, which is unknown")
    check_text(_SALT, salt.encode())
    check_asked(found["error_rate"])
    return Origin(salt=bytes.fromhex(salt), **found)


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


def made_keys(bitmap: bytes) -> list[int]:
    """Return the numbers of the bits that are set in a bitmap, but the last one."""
    bits = bitarray(bitmap, endian="big")
    return list(bits.search(bitarray("1")))[:-1]


def chunks(server: RedisServer, key: str, generation: RedisGeneration) -> Iterator[bytes]:
    """Return the blocks of a generation, key by key; raises StorageError if a key was lost."""
    bitmap = server.send("GET", bitmap_key(key, generation.id)) or b""
    if len(bitmap) != generation.num_chunks // 8 + 1:
        raise _lost(server, key, generation)
    made = set(made_keys(bitmap))
    for chunk in range(generation.num_chunks):
        data = bytes(generation.chunk_bytes(chunk))
        if chunk in made:
            data = server.send("GET", block_key(key, generation.id, chunk)) or b""
        if len(data) != generation.chunk_bytes(chunk):
            raise _lost(server, key, generation)
        yield data


class RedisReader:
    """Reads a filter in Redis, with the interface of `FilterReader`, which reads files.

    Each method may raise a StorageError. The constructor raises it if the filter is missing.

    Args:
        server: the connection, which `close` closes.
        key: the key of the filter.
    """

    # Unknown, because any crawl may share the filter.
    is_closed: bool | None = None
    is_in_use: bool | None = None

    def __init__(self, server: RedisServer, key: str) -> None:
        self._server = server
        self._key = key
        stored = read_existing(server, key)
        self.generations = stored.generations
        self.location = f"{server.address}, key {key}"
        self.spider, self.fingerprinter = stored.origin.spider, stored.origin.fingerprinter
        self.error_rate = stored.origin.error_rate
        # The generations, and where each has the bits of a fingerprint.
        self._live = [
            (generation, make_hasher(stored.salt, generation.geometry.num_hashes))
            for generation in stored.generations
        ]

    def are_seen(self, fingerprints: Sequence[bytes]) -> list[bool]:
        """Return which fingerprints are recorded, with false positives."""
        recorded = [False] * len(fingerprints)
        asked: list[int] = []  # for each command, the index of its fingerprint
        commands: list[tuple[Any, ...]] = []
        used: dict[str, tuple[RedisGeneration, int]] = {}  # the keys of blocks that are read
        for index, fingerprint in enumerate(fingerprints):
            for generation, locate in self._live:
                block_hash, positions = locate(fingerprint)
                place = block_of(block_hash, generation.geometry.num_blocks)
                chunk, block = divmod(place, CHUNK_BLOCKS)
                name = block_key(self._key, generation.id, chunk)
                bits = [("GET", "u1", block * BLOCK_BITS + each) for each in positions]
                asked.append(index)
                commands.append(("BITFIELD_RO", name, *chain(*bits)))
                used[name] = generation, chunk
        for index, answer in zip(asked, self._server.batches(commands), strict=True):
            recorded[index] |= all(answer)
        self._check(used)
        return recorded

    def _check(self, used: Mapping[str, tuple[RedisGeneration, int]]) -> None:
        """Raise a StorageError if keys are lost, because BITFIELD_RO returns 0 for their bits."""
        commands: list[tuple[Any, ...]] = []
        for name, (generation, chunk) in used.items():
            bitmap = bitmap_key(self._key, generation.id)
            commands += [("GETBIT", bitmap, generation.num_chunks), ("GETBIT", bitmap, chunk)]
            commands.append(("STRLEN", name))  # later, because a crawl may be making the key
        answers = self._server.batches(commands)
        for index, (generation, chunk) in enumerate(used.values()):
            has_bitmap, was_made, length = answers[3 * index : 3 * index + 3]
            is_empty = length == 0 and has_bitmap and not was_made
            if length != generation.chunk_bytes(chunk) and not is_empty:
                raise _lost(self._server, self._key, generation)

    def block_fills(self) -> list[Iterator[float]]:
        """Return for each generation the share of set bits of each of its blocks, 0 to 1."""
        return [
            chain.from_iterable(map(block_fills, chunks(self._server, self._key, each)))
            for each in self.generations
        ]

    def close(self) -> None:
        """Close the connection."""
        self._server.close()


def _lost(server: RedisServer, key: str, generation: RedisGeneration) -> StorageError:
    return StorageError(
        f"{server.address} has lost keys of generation {generation.number} of the filter "
        f"{key!r}; the next crawl starts over with an empty filter"
    )
