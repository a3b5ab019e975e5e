"""Read, create, change and remove filters in Redis, also while crawls use them.

The hash of a filter, whose fields `scrapy_bloom.redis.layout` documents, is untrusted, so it is
checked. The script that removes a generation adds a field for it; any crawl that reads such a field
removes the keys of the generation.
"""

import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from typing import Any

from bitarray import bitarray

from scrapy_bloom.exceptions import RefusedError, StorageError
from scrapy_bloom.filters.bloom import BloomFilter
from scrapy_bloom.filters.hashing import HASH_SCHEME, block_of, make_hasher
from scrapy_bloom.filters.sizing import BLOCK_BITS, BLOCK_BYTES, Geometry
from scrapy_bloom.generations.policy import Generation, Origin, check_generation
from scrapy_bloom.redis.connection.server import RedisServer
from scrapy_bloom.redis.layout import CHUNK_BLOCKS, KEYS, bitmap_key, block_key, keys_of
from scrapy_bloom.redis.lua_scripts import packed, script

FORMAT_VERSION = 1

_FIGURES = ("capacity", "error_rate", "first_run", "last_run")
_LONGEST = 1 << 16  # bytes of a field; ours have a few hundred
ID = re.compile(rb"[0-9a-f]{16}")  # of a filter, a generation or a worker
_NUMBER = re.compile(rb"[0-9]{1,18}")


def described(origin: Origin) -> str:
    """Return the field `filter` of a new filter."""
    scheme = {"format": FORMAT_VERSION, "hash_scheme": HASH_SCHEME, "salt": origin.salt.hex()}
    return json.dumps({**vars(origin), **scheme})


@dataclass(eq=False, kw_only=True)
class RedisGeneration(Generation):
    """A generation in Redis, and its mirror in this process."""

    id: str = field(default_factory=lambda: secrets.token_hex(8))  # part of the names of its keys
    mirror: BloomFilter | None = None  # the bits known to be set
    made: set[int] = field(default_factory=set)  # numbers of keys known to be made

    @classmethod
    def of(cls, figures: Generation) -> "RedisGeneration":
        """Return a new generation with these figures."""
        names = "number", "geometry", "count", *_FIGURES
        return cls(**{name: getattr(figures, name) for name in names})

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
        content = {"id": self.id, **self.geometry._asdict()}
        content |= {name: getattr(self, name) for name in _FIGURES}
        return {f"gen:{self.number}": json.dumps(content), f"count:{self.number}": str(self.count)}


@dataclass(frozen=True)
class Stored:
    """The parsed hash of a filter."""

    id: str
    version: str
    origin: Origin
    generations: Sequence[RedisGeneration]  # oldest first, at least one
    unlinked: Sequence[str]  # ids of expired generations whose keys are left
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
    bitmaps = server.call(lambda client: list(client.scan_iter(match=pattern, count=1000)))
    return sorted({name.decode(errors="replace").partition("}")[0][1:] for name in bitmaps})


def _parsed(raw: Mapping[bytes, bytes]) -> Stored:
    """Parse all fields of a hash.

    Raises a StorageError if the filter is of a newer format, and a ValueError that names the field
    if the hash is not a filter, or is damaged.
    """
    name, generations, unlinked = b"", [], []
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
    except KeyError:
        raise ValueError(f"it has no field {name.decode()!r}") from None
    except (ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"its field {name[:60]!a}: {str(error)[:200]}") from None
    generations.sort(key=attrgetter("number"))
    numbers = [generation.number for generation in generations]
    if not numbers or numbers != list(range(numbers[0], numbers[-1] + 1)):
        raise ValueError(f"its generations are {numbers}")
    if len({generation.id for generation in generations}) < len(generations):
        raise ValueError("two of its generations have one id")
    return Stored(
        id=raw[b"id"].decode(),
        version=raw[b"version"].decode(),
        origin=origin,
        generations=generations,
        unlinked=unlinked,
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
    members = _members(text, {**types, "error_rate": float})
    scheme, salt = members.pop("hash_scheme"), members.pop("salt")
    if version != FORMAT_VERSION or scheme != HASH_SCHEME:
        raise ValueError(f"format {version}, hash scheme {scheme}, which is unknown")
    return Origin(salt=bytes.fromhex(salt), **members)


def _generation(raw: Mapping[bytes, bytes], number: int) -> RedisGeneration:
    types = {"id": str, **dict.fromkeys(_FIGURES, float), "capacity": int}
    types |= dict.fromkeys(Geometry._fields, int)
    members = _members(raw[b"gen:%d" % number], types)
    check_text(ID, members["id"].encode())
    geometry = Geometry(*map(members.pop, Geometry._fields))
    count = parsed_whole(raw.get(b"count:%d" % number, b"0"))
    new = RedisGeneration(number=number, geometry=geometry, count=count, **members)
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
    stored, members = json.loads(text) if len(text) < _LONGEST else None, {}
    if not isinstance(stored, dict):
        raise ValueError("it is no JSON object, or far too long")  # noqa: TRY004 - a wrong value, not a wrong argument
    for name, kind in types.items():
        value: Any = stored.get(name)
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise ValueError(f"{name} is {ascii(value)[:60]}")
        if kind is str:
            value.encode()  # refuses lone surrogates, which JSON may contain
        members[name] = value
    return members


def made_keys(bitmap: bytes) -> list[int]:
    """Return the numbers of the bits that are set in a bitmap, but the last one."""
    bits = bitarray(bitmap, endian="big")
    return list(bits.search(bitarray("1")))[:-1]


def _made(server: RedisServer, key: str, generation: RedisGeneration) -> set[int]:
    """Return the numbers of the keys that were made; raises StorageError if that was lost."""
    bitmap = server.send("GET", bitmap_key(key, generation.id)) or b""
    if len(bitmap) != generation.num_chunks // 8 + 1:
        raise _lost(server, key, generation)
    return set(made_keys(bitmap))


def chunks(server: RedisServer, key: str, generation: RedisGeneration) -> Iterator[bytes]:
    """Return the blocks of a generation, key by key; raises StorageError if a key was lost."""
    made = _made(server, key, generation)
    for chunk in range(generation.num_chunks):
        data = bytes(generation.chunk_bytes(chunk))
        if chunk in made:
            data = server.send("GET", block_key(key, generation.id, chunk)) or b""
        if len(data) != generation.chunk_bytes(chunk):
            raise _lost(server, key, generation)
        yield data


def change(
    server: RedisServer,
    key: str,
    known: tuple[str, str],
    fields: Mapping[str, str],
    *,
    next_version: str = "",
    removed: Sequence[str] = (),
    added: Sequence[RedisGeneration] = (),
    sizes: Mapping[str, tuple[str, int]] | None = None,
) -> str:
    """Create a filter, or change fields of its hash, in one step.

    The id and the version that are `known` are empty if there must be no filter. Of a complete
    copy, `sizes` has for each further key the command that counts what it has, and how many it must
    have. Returns "ok"; "other" if another filter is there, or none; "version" if another crawl has
    changed the filter; "lost" if a size differs. Raises a RefusedError if there is no filter, and a
    key of its queue has a value of another program.
    """
    bitmaps = [bitmap_key(key, generation.id) for generation in added]
    values = {
        "id": known[0],
        "version": known[1],
        "next_version": next_version or secrets.token_hex(8),
        "num_queue": len(KEYS),
        "fields": [word for field in fields.items() for word in field],
        "removed": removed,
        "num_keys": [generation.num_chunks for generation in added],
        "sizes": [*(sizes or {}).values()],
    }
    keys = [key, *sizes] if sizes else [*keys_of(key), *bitmaps]
    answer = server.script(script("change"), keys, packed(values))
    if answer == b"foreign":
        raise RefusedError(
            f"{server.address} has no filter {key!r}, but a key that begins with {{{key}}} has a "
            "value of another program, which was left as it is: set BLOOM_REDIS_KEY to another name"
        )
    return str(answer.decode())


def remove_filter(server: RedisServer, key: str, filter_id: str) -> None:
    """Remove the filter with an id and its queue, for all crawlers; another filter is kept."""
    stored = read_stored(server, key, may_be_copied=True)  # others may have changed the generations
    keys = [key, *keys_of(key)]
    if stored and server.script(script("command"), keys, filter_id, "UNLINK") == b"ok":
        ids = [generation.id for generation in stored.generations]
        remove_blocks(server, key, [*stored.unlinked, *ids])


def remove_blocks(server: RedisServer, key: str, generation_ids: Sequence[str]) -> None:
    """Remove the keys of generations that are no longer in the filter's hash.

    The function is idempotent, and several crawls may call it at the same time.
    """
    for generation_id in generation_ids:
        bitmap = bitmap_key(key, generation_id)
        made = made_keys(server.send("GET", bitmap) or b"")
        server.batches([("UNLINK", block_key(key, generation_id, chunk)) for chunk in made])
        server.send("UNLINK", bitmap)


class RedisReader:
    """Reads a filter in Redis, with the interface of `FilterReader`, which reads files.

    Each method may raise a StorageError, also the constructor, for example if there is no filter.
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
        self.origin = stored.origin
        # The generations, and where each has the bits of a fingerprint.
        self._live = [
            (generation, make_hasher(stored.origin.salt, generation.geometry.num_hashes))
            for generation in stored.generations
        ]

    def are_seen(self, fingerprints: Sequence[bytes]) -> list[bool]:
        """Return which fingerprints are recorded, with false positives."""
        recorded = [False] * len(fingerprints)
        for generation, locate in self._live:
            made = _made(self._server, self._key, generation)  # first: a crawl may make others
            commands: list[tuple[Any, ...]] = []
            asked = []  # the numbers of keys
            for fingerprint in fingerprints:
                block_hash, positions = locate(fingerprint)
                place = block_of(block_hash, generation.geometry.num_blocks)
                chunk, block = divmod(place, CHUNK_BLOCKS)
                name = block_key(self._key, generation.id, chunk)
                bits = [("GET", "u1", block * BLOCK_BITS + position) for position in positions]
                # Of a key that is lost, all bits are 0.
                commands += [("BITFIELD_RO", name, *chain(*bits)), ("STRLEN", name)]
                asked.append(chunk)
            answers = self._server.batches(commands)
            for index, chunk in enumerate(asked):
                bits, length = answers[2 * index : 2 * index + 2]
                if length != generation.chunk_bytes(chunk) and (length or chunk in made):
                    raise _lost(self._server, self._key, generation)
                recorded[index] |= all(bits)
        return recorded

    def blocks(self, index: int) -> Iterator[bytes]:
        """Yield the blocks of a generation, several at a time."""
        return chunks(self._server, self._key, self.generations[index])

    def close(self) -> None:
        """Close the connection."""
        self._server.close()


def _lost(server: RedisServer, key: str, generation: RedisGeneration) -> StorageError:
    return StorageError(
        f"{server.address} has lost keys of generation {generation.number} of the filter "
        f"{key!r}; the next crawl starts over with an empty filter"
    )
