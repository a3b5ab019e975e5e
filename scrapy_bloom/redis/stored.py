"""Read, create, change and remove filters in Redis, also while crawls use them.

The hash of a filter, whose fields `scrapy_bloom.redis.layout` documents, is untrusted, so it is
checked.
"""

import json
import re
import secrets
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import Any

from bitarray import bitarray

from scrapy_bloom.exceptions import RefusedError, StorageError
from scrapy_bloom.filters.hashing import HASH_SCHEME, Hashed, make_hasher
from scrapy_bloom.filters.sizing import BLOCK_BYTES, Geometry
from scrapy_bloom.generations.policy import Generation, Origin, check_generation
from scrapy_bloom.redis.layout import CHUNK_BLOCKS, bitmap_key, block_key, blocks_prefix, keys_of
from scrapy_bloom.redis.server import RedisServer

FORMAT_VERSION = 1
MOST_AT_ONCE = 32  # fingerprints that one script looks up or records, in less than 5 ms

_REMOVED_AT_ONCE = 64  # keys
_FIGURES = ("capacity", "error_rate", "first_run", "last_run")
_LONGEST = 1 << 16  # bytes of a field; ours have a few hundred
ID = re.compile(rb"[0-9a-f]{16}")  # of a filter, a generation or a worker
_NUMBER = re.compile(rb"[0-9]{1,18}")


@dataclass(eq=False, kw_only=True)
class RedisGeneration(Generation):
    """A generation in Redis."""

    id: str = field(default_factory=lambda: secrets.token_hex(8))  # part of the names of its keys

    @property
    def num_chunks(self) -> int:
        """Return how many keys hold its blocks."""
        return -(-self.geometry.num_blocks // CHUNK_BLOCKS)

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

    key: str
    id: str
    version: str
    origin: Origin
    generations: Sequence[RedisGeneration]  # oldest first, at least one
    unlinked: Sequence[str]  # ids of expired generations whose keys are left
    sample: str = ""

    @cached_property
    def arguments(self) -> Mapping[str, Any]:
        """The arguments of a script that looks fingerprints up."""
        return {
            "id": self.id,
            "version": self.version,
            "count_field": f"count:{self.generations[-1].number}",
            "generations": [
                {"prefix": blocks_prefix(self.key, generation.id), **generation.geometry._asdict()}
                for generation in self.generations
            ],
        }

    @property
    def record_keys(self) -> list[str]:
        """The keys of the script `record`.

        The second never exists. So a Cluster refuses the script while the slot moves to another
        node, and it is tried again. Otherwise, the blocks that have moved would seem to be lost.
        """
        return [self.key, f"{{{self.key}}}:none"]


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
        return _parsed(key, raw)
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


def _parsed(key: str, raw: Mapping[bytes, bytes]) -> Stored:
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
        key=key,
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


def chunks(server: RedisServer, key: str, generation: RedisGeneration) -> Iterator[bytes]:
    """Return the blocks of a generation, key by key; raises StorageError if a key was lost."""
    bitmap = server.send("GET", bitmap_key(key, generation.id)) or b""
    if len(bitmap) != generation.num_chunks // 8 + 1:
        raise _lost(server, key, generation)
    made = set(_made_keys(bitmap))
    for chunk in range(generation.num_chunks):
        data = bytes(generation.chunk_bytes(chunk))
        if chunk in made:
            data = server.send("GET", block_key(key, generation.id, chunk)) or b""
        if len(data) != generation.chunk_bytes(chunk):
            raise _lost(server, key, generation)
        yield data


def packed_bits(hashed: Hashed) -> bytes:
    """Return the bits of a fingerprint as scripts take them."""
    block_hash, positions = hashed
    return struct.pack(f">Q{len(positions)}H", block_hash, *positions)[2:]  # 48 of 64 bits


def create(
    server: RedisServer, key: str, origin: Origin, new: Sequence[RedisGeneration], **fields: str
) -> tuple[str, str] | None:
    """Create a filter; return its id and version, or None if one is there already.

    Raises a RefusedError if a key of its queue has a value of another program.
    """
    scheme = {"format": FORMAT_VERSION, "hash_scheme": HASH_SCHEME, "salt": origin.salt.hex()}
    known = secrets.token_hex(8), secrets.token_hex(8)
    fields |= {"id": known[0], "filter": json.dumps({**vars(origin), **scheme})}
    answer = change(server, key, ("", ""), fields, next_version=known[1], added=new)
    if answer == "foreign":
        raise RefusedError(
            f"{server.address} has no filter {key!r}, but a key that begins with {{{key}}} has a "
            "value of another program, which was left as it is: set BLOOM_REDIS_KEY to another name"
        )
    return known if answer == "ok" else None


def change(
    server: RedisServer,
    key: str,
    known: tuple[str, str],
    fields: Mapping[str, str],
    *,
    next_version: str = "",
    removed: Sequence[str] = (),
    added: Sequence[RedisGeneration] = (),
) -> str:
    """Change fields of a filter's hash in one step, if it has the id and version that are known.

    Returns "ok"; "other" if another filter is there, or none; "version" if another crawl has
    changed the filter.
    """
    items = [*fields.items(), *(item for new in added for item in new.fields.items())]
    values = {
        "known": known,
        "next_version": next_version or secrets.token_hex(8),
        "fields": [word for item in items for word in item],
        "removed": removed,
        "num_keys": [generation.num_chunks for generation in added],
    }
    bitmaps = [bitmap_key(key, generation.id) for generation in added]
    return str(server.run("change", [*keys_of(key), *bitmaps], values)["status"].decode())


def remove_filter(server: RedisServer, key: str, filter_id: str) -> None:
    """Remove the filter with an id and its queue, for all crawlers; another filter is kept."""
    stored = read_stored(server, key, may_be_copied=True)  # others may have changed the generations
    if stored and server.run("remove", keys_of(key), {"id": filter_id})["status"] == b"ok":
        ids = [generation.id for generation in stored.generations]
        remove_blocks(server, key, [*stored.unlinked, *ids])


def remove_blocks(server: RedisServer, key: str, generation_ids: Sequence[str]) -> None:
    """Remove the keys of generations that are no longer in the filter's hash.

    The function is idempotent, and several crawls may call it at the same time.
    """
    for generation_id in generation_ids:
        bitmap = bitmap_key(key, generation_id)
        made = _made_keys(server.send("GET", bitmap) or b"")
        names = [block_key(key, generation_id, chunk) for chunk in made]
        for start in range(0, len(names), _REMOVED_AT_ONCE):
            server.send("UNLINK", *names[start : start + _REMOVED_AT_ONCE])
        server.send("UNLINK", bitmap)


def _made_keys(bitmap: bytes) -> list[int]:
    """Return the numbers of the bits that are set in a bitmap, but the last one."""
    bits = bitarray(bitmap, endian="big")
    return list(bits.search(bitarray("1")))[:-1]


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
        self._stored = stored = read_existing(server, key)
        self.generations = stored.generations
        self.location = f"{server.address}, key {key}"
        self.origin = stored.origin

    def are_seen(self, fingerprints: Sequence[bytes]) -> list[bool]:
        """Return which fingerprints are recorded, with false positives."""
        seen: list[bool] = []
        while some := fingerprints[len(seen) : len(seen) + MOST_AT_ONCE]:
            stored = self._stored
            most = max(generation.geometry.num_hashes for generation in stored.generations)
            locate = make_hasher(stored.origin.salt, most)
            bits = [packed_bits(locate(fingerprint)) for fingerprint in some]
            values = {**stored.arguments, "bits": bits, "records": False}
            reply = self._server.run("record", stored.record_keys, values)
            if reply["status"] == b"ok":
                seen += [place > 0 for place in reply["places"]]
            elif reply["status"] == b"lost":
                raise _lost(self._server, self._key, stored.generations[reply["place"] - 1])
            else:  # a crawl has changed the filter
                self._stored = read_existing(self._server, self._key)
        return seen

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
