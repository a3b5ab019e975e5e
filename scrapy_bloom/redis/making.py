"""Make the keys of a filter, which no crawl uses before a script publishes them.

The keys expire within an hour, so a process that dies leaves nothing behind. A lock keeps two
processes from making the same generation, which would take its memory twice. The lock is not needed
for correctness: the script that publishes a generation decides whose keys are used.

The script that publishes or removes a generation adds a field to the filter's hash, which tells
what is left to do with the keys. Any crawl that reads such a field does it.
"""

import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.generations.lifecycle import NoRoomError
from scrapy_bloom.redis.connection.server import RedisServer
from scrapy_bloom.redis.layout import keys_of
from scrapy_bloom.redis.scripts import (
    CREATE,
    MAKE,
    REMOVE,
    block_key,
    block_keys,
    maker_key,
)
from scrapy_bloom.redis.stored import RedisGeneration, Unfinished, read_stored

_EXPIRE_SECS = 3600  # until keys expire that were not published
_LOCK_MS = 60_000
_RENEW_SECS = 10.0
_EXTEND_SECS = 600.0  # how often the expiry of the keys is extended
_KEYS_AT_ONCE = 1000  # keys of a generation that one round trip removes or makes permanent
_MADE_AT_ONCE = 2  # keys made by one script: a key of 1 MiB takes a millisecond


class Maker:
    """Makes generations of one filter; `close` must be called at the end.

    Args:
        server: the connection.
        key: the name of the filter's hash.
    """

    def __init__(self, server: RedisServer, key: str) -> None:
        self._server = server
        self._key = key
        self._lock = maker_key(key)
        self._token = secrets.token_hex(8)
        self._made: list[RedisGeneration] = []
        self._sizes: dict[str, int] = {}  # of temporary sets and hashes, by their final names
        self._renewed_at = 0.0
        self._extended_at = time.monotonic()

    def begin(self, filter_id: str, version: str) -> bool:
        """Take the lock.

        Args:
            filter_id: the id of the filter that the caller knows; empty if there is no filter.
            version: the version of that filter; empty if there is no filter.

        Returns:
            False if another process is making a generation, or has changed the filter.
        """
        commands = [
            ("SET", self._lock, self._token, "NX", "PX", _LOCK_MS),
            ("GET", self._lock),
            ("HMGET", self._key, "id", "version"),
        ]
        _, owner, found = self._server.batches(commands)
        self._renewed_at = time.monotonic()
        return bool(
            owner == self._token.encode()
            and [each or b"" for each in found] == [filter_id.encode(), version.encode()]
        )

    def make(self, new: RedisGeneration) -> None:
        """Make the keys of an empty generation; raises NoRoomError if the memory is full."""
        self._made.append(new)
        for start in range(0, new.num_chunks, _MADE_AT_ONCE):
            self._make_empty(new, range(start, min(start + _MADE_AT_ONCE, new.num_chunks)))
        self._check_room(new)

    def copy(self, new: RedisGeneration, chunks: Iterable[bytes]) -> None:
        """Make the keys of a generation from its blocks, `CHUNK_BLOCKS` at a time.

        Raises:
            NoRoomError: the server's memory is full.
            StorageError: or one of its children: a key that was read back differs.
        """
        self._made.append(new)
        for chunk, data in enumerate(chunks):
            self._write(new, chunk, data)
        self._check_room(new)

    def _check_room(self, new: RedisGeneration) -> None:
        # The server checks its memory before a write, not after it. If the last key has filled the
        # memory, this call fails.
        self._make_empty(new, range(new.num_chunks - 1, new.num_chunks))

    def _make_empty(self, new: RedisGeneration, chunks: range) -> None:
        names = [block_key(self._key, new.id, chunk) for chunk in chunks]
        lengths = [new.chunk_bytes(chunk) for chunk in chunks]
        self._server.script(MAKE, names, _EXPIRE_SECS, *lengths, fails_when_full=True)
        self.renew()

    def _write(self, new: RedisGeneration, chunk: int, data: bytes) -> None:
        name = block_key(self._key, new.id, chunk)
        written = self._server.transaction(
            # As text, because hiredis 3.5 crashes if a signal arrives before it converts a number.
            ("SET", name, data, "NX", "EX", str(_EXPIRE_SECS)),
            ("GET", name),
            fails_when_full=True,
        )
        if written[1] != data:
            raise StorageError(
                f"the copy in {self._server.address} differs, and was removed. Check the memory of "
                "that machine, and try again"
            )
        self.renew()

    def add(self, name: str, members: Sequence[bytes]) -> None:
        """Add members to a temporary sorted set, which gets its name when the filter is created.

        Raises NoRoomError if the server's memory is full.
        """
        self._add(name, "ZADD", [word for member in members for word in ("0", member)])

    def add_fields(self, name: str, fields: Mapping[bytes, bytes]) -> None:
        """Add fields to a temporary hash, as `add` does to a set."""
        self._add(name, "HSET", [word for field in fields.items() for word in field])

    def _add(self, name: str, command: str, words: Sequence[bytes | str]) -> None:
        temporary = self._temporary(name)
        self._server.transaction(
            (command, temporary, *words),
            ("EXPIRE", temporary, _EXPIRE_SECS),
            fails_when_full=True,
        )
        self._sizes[name] = self._sizes.get(name, 0) + len(words) // 2
        self.renew()

    def _temporary(self, name: str) -> str:
        return f"{name}:{self._token}"

    def renew(self) -> None:
        """Renew the lock, and the time until the keys expire, if that is due."""
        now = time.monotonic()
        if now > self._renewed_at + _RENEW_SECS:
            self._server.send("EXPIRE", self._lock, _LOCK_MS // 1000)
            self._renewed_at = now
        if now > self._extended_at + _EXTEND_SECS:
            self._extended_at = now
            names = [*self._block_keys(), *map(self._temporary, self._sizes)]
            self._server.batches([("EXPIRE", name, _EXPIRE_SECS) for name in names])

    def _block_keys(self) -> list[str]:
        return [
            name for new in self._made for name in block_keys(self._key, new.id, new.num_chunks)
        ]

    def check(self) -> None:
        """Check before the publication that all keys still exist.

        When its memory is full, a server with a maxmemory-policy of volatile-* evicts these keys,
        because they expire, instead of refusing writes.

        Raises:
            NoRoomError: keys are missing.
        """
        if not all(self._server.batches([("EXISTS", name) for name in self._block_keys()])):
            raise NoRoomError("the server has evicted keys while they were made")

    def create(self, filter_id: str, fields: Mapping[str, str]) -> str:
        """Create the filter from all keys that were made, in one step.

        Returns:
            "ok"; "other" if a filter exists; "lost" if the server has lost requests.
        """
        for each in self._made:
            fields = {**fields, **each.new_fields}
        keys = [*keys_of(self._key), *map(self._temporary, self._sizes), *self._sizes]
        words = [word for field in fields.items() for word in field]
        answer = self._server.script(
            CREATE, keys, filter_id, *self._sizes.values(), len(fields), *words
        )
        return str(answer[0].decode())

    def close(self) -> None:
        """Remove the keys of generations that were not published, and release the lock."""
        with suppress(StorageError):  # otherwise the keys and the lock expire
            for new in self._made:
                # They may be published although the reply was lost.
                stored = self._server.send("HGET", self._key, f"gen:{new.number}")
                if new.id.encode() not in (stored or b""):
                    remove_blocks(self._server, self._key, new.id, new.num_chunks)
            self._server.batches([("UNLINK", self._temporary(name)) for name in self._sizes])
            if self._server.send("GET", self._lock) == self._token.encode():
                self._server.send("UNLINK", self._lock)


def finish(server: RedisServer, key: str, unfinished: Sequence[Unfinished]) -> None:
    """Make the keys of published generations permanent, and remove those of expired generations.

    The function is idempotent, and several crawls may call it at the same time.
    """
    for action, generation_id, number in unfinished:
        if action == "unlink":
            remove_blocks(server, key, generation_id, number)
        else:
            _each_block(server, "PERSIST", key, generation_id, number)
        server.send("HDEL", key, f"{action}:{generation_id}")


def remove_filter(server: RedisServer, key: str, filter_id: str) -> None:
    """Remove a filter and its queue, for all crawlers, unless it was replaced.

    Args:
        server: the connection.
        key: the name of the filter's hash.
        filter_id: the id of the filter; another filter is kept.
    """
    stored = read_stored(server, key)  # others may have changed the generations
    if stored is None:
        return
    finish(server, key, stored.unfinished)
    if server.script(REMOVE, keys_of(key), filter_id)[0] == b"ok":
        for each in stored.generations:
            remove_blocks(server, key, each.id, each.num_chunks)


def remove_blocks(server: RedisServer, key: str, generation_id: str, number: int) -> None:
    """Remove the keys of a generation that is no longer in the filter's hash."""
    _each_block(server, "UNLINK", key, generation_id, number)


def _each_block(
    server: RedisServer, command: str, key: str, generation_id: str, number: int
) -> None:
    """Send a command for each key of a generation; the last key last, if it was interrupted.

    A number that is damaged costs no more than the keys that exist.
    """
    has_last = server.send("EXISTS", block_key(key, generation_id, number - 1))
    for start in range(0, number, _KEYS_AT_ONCE):
        chunks = range(start, min(start + _KEYS_AT_ONCE, number))
        names = [block_key(key, generation_id, chunk) for chunk in chunks]
        if not any(server.batches([(command, name) for name in names])) and not has_last:
            break
