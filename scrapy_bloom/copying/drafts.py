"""A filter and its queue on their way into Redis: nobody finds them before all of it is there.

Blocks have their final names, and the fields `draft:<id>` of the filter's hash name them, as while
a crawl makes a generation. The process that makes the next generation removes the drafts of a copy
that was killed. Sorted sets have temporary names, and expire.
"""

import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.redis.filter import OtherFilterError, SharedFilter
from scrapy_bloom.redis.scripts import DRAFTS, block_key
from scrapy_bloom.redis.stored import RedisGeneration

_RENEW_SECS = 10.0
_EXPIRE_SECS = 3600
_AT_ONCE = 64  # keys that are removed by one command

_SETS = ("pending", "suspects", "dead", "forgotten")

# Keys: as all scripts have them; then temporary sets, and the names that they get. Arguments: id
# of the filter; how many members each set must have; drafts: how many, and these; fields and
# values. The fields come first: if the server's memory is full, nothing is changed.
_PUBLISH = (
    DRAFTS
    + """
local there = redis.call('HGET', KEYS[1], 'id')
if there == ARGV[1] then return 'ok' end  -- the reply was lost
if there then return 'there' end
local sets = 4
local ours = #KEYS - 2 * sets
for index = 1, sets do
  if redis.call('ZCARD', KEYS[ours + index]) ~= tonumber(ARGV[1 + index]) then return 'lost' end
end
local drafts = tonumber(ARGV[2 + sets])
at = 2 + sets
for index = 1, drafts do
  if not is_live(ARGV[at + index]) then return 'lost' end
end
for index = at + drafts + 1, #ARGV, 2 do
  redis.call('HSET', KEYS[1], ARGV[index], ARGV[index + 1])
end
redis.call('UNLINK', unpack(KEYS, 2, ours))
for index = 1, sets do
  if ARGV[1 + index] ~= '0' then
    redis.call('RENAME', KEYS[ours + index], KEYS[ours + sets + index])
    redis.call('PERSIST', KEYS[ours + sets + index])
  end
end
for index = 1, drafts do redis.call('HDEL', KEYS[1], 'draft:' .. ARGV[at + index]) end
redis.call('HSET', KEYS[1], 'id', ARGV[1])
return 'ok'
"""
)


class Draft:
    """A filter that is being copied into Redis.

    Args:
        filter_: where it goes.
        generations: all of them, oldest first.

    Raises a StorageError if there is a filter, or somebody else is making one.
    """

    def __init__(self, filter_: SharedFilter, generations: Sequence[RedisGeneration]) -> None:
        self._filter = filter_
        self._server = filter_.server
        self._generations = generations
        self._id = secrets.token_hex(8)
        names = dict(zip(_SETS, (filter_.keys[index] for index in (1, 4, 5, 9)), strict=True))
        self._final = names
        self._temporary = {name: f"{key}:{self._id}" for name, key in names.items()}
        self._numbers = dict.fromkeys(_SETS, 0)
        self._renewed_at = 0.0

        self._note(begin=True)

    def close(self) -> None:
        """Remove all of it, unless it was published."""
        with suppress(StorageError):  # else the next filter to be made removes it
            if self._server.send("HGET", self._filter.key, "id") == self._id.encode():
                return
            remove_drafts(self._filter, {each.id: each.num_chunks for each in self._generations})
            self._server.send("UNLINK", *self._temporary.values())

    def write(self, generation: RedisGeneration, chunk: int, data: bytes) -> None:
        """Write a key of blocks, and compare what is there then; raises a StorageError."""
        key = self._filter.chunk_key(generation, chunk)
        self._send(("SET", key, data))
        if self._server.send("GET", key) != data:
            self._note(begin=False)  # perhaps somebody gave this copy up, and removed the key
            raise StorageError(
                f"the copy in {self._server.address} differs; it was removed: try again, and check "
                "the memory of that machine"
            )
        self._renew()

    def add(self, name: str, members: Iterable[tuple[float, bytes]]) -> None:
        """Add members, each with its score, to the set of that name: see `_SETS`."""
        key = self._temporary[name]
        words = [word for member in members for word in member]
        self._send(("ZADD", key, *words), ("EXPIRE", key, _EXPIRE_SECS))
        self._numbers[name] += len(words) // 2
        self._renew()

    def publish(self, fields: Mapping[str, str]) -> None:
        """Make the filter and its queue known, all at once, or raise a StorageError."""
        for each in self._generations:
            fields = {**fields, **each.fields}
        ids = [each.id for each in self._generations]
        keys = [*self._filter.keys, *self._temporary.values(), *self._final.values()]
        words = [*self._numbers.values(), len(ids), *ids]
        words += [word for field in fields.items() for word in field]
        answer = self._server.script(_PUBLISH, keys, self._id, *words)
        if answer != b"ok":
            raise self._refused(answer)

    def _send(self, *commands: Sequence[Any]) -> None:
        def send(client: Any) -> None:
            pipeline = client.pipeline(transaction=True)
            for command in commands:
                pipeline.execute_command(*command)
            try:
                pipeline.execute()
            except Exception as error:
                if "OOM" not in str(error) and type(error).__name__ != "OutOfMemoryError":
                    raise
                raise StorageError(
                    f"{self._server.address}: the server's memory is full (maxmemory); what was "
                    "copied so far was removed"
                ) from None

        self._server.call(send)

    def _renew(self) -> None:
        if time.monotonic() > self._renewed_at + _RENEW_SECS:
            self._note(begin=False)
            for key in self._temporary.values():
                self._server.send("EXPIRE", key, _EXPIRE_SECS)

    def _note(self, *, begin: bool) -> None:
        try:
            if not self._filter.note_drafts(self._generations, goes_on=not begin):
                raise self._refused(b"busy" if begin else b"lost")
        except OtherFilterError:
            raise self._refused(b"there") from None
        self._renewed_at = time.monotonic()

    def _refused(self, answer: bytes) -> StorageError:
        name, address = self._filter.key, self._server.address
        if answer == b"busy":
            return StorageError(
                f"another crawl or copy is making the filter {name!r} in {address}; nothing was "
                "changed: try again in a minute"
            )
        if answer == b"there" and not self._renewed_at:
            return StorageError(
                f"{address} has a filter {name!r} already; nothing was changed: give it another "
                "key, or remove that one"
            )
        return StorageError(
            f"{address}: another crawl or copy has made, or removed, a filter {name!r} meanwhile, "
            "or the server has lost a part of this copy; this copy was removed"
        )


def drafts_of(filter_: SharedFilter) -> dict[str, int]:
    """Return what the hash of a filter names as drafts: their ids, and numbers of keys."""
    drafts = {}
    for field, text in filter_.server.send("HGETALL", filter_.key).items():
        name, _, draft = field.decode(errors="replace").partition(":")
        if name == "draft":
            number = text.partition(b",")[0].strip(b"[ ")
            drafts[draft] = int(number) if number.isdigit() and len(number) < 8 else 0
    return drafts


def remove_drafts(filter_: SharedFilter, drafts: Mapping[str, int]) -> None:
    """Remove blocks that belong to no filter, and the fields that name them."""
    for draft, number in drafts.items():
        for start in range(0, number, _AT_ONCE):
            chunks = range(start, min(start + _AT_ONCE, number))
            keys = [block_key(filter_.key, draft, chunk) for chunk in chunks]
            filter_.server.send("UNLINK", *keys)
        filter_.server.send("HDEL", filter_.key, f"draft:{draft}")
