"""The access of one crawl to a filter in Redis: generations and mirrors.

Each change of the generations gives the filter a new version, and each script names the version
that it expects. So no bit is set in a generation that has ended.
"""

import secrets
import struct
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from scrapy_bloom.exceptions import FingerprinterMismatchError, StorageError
from scrapy_bloom.filters.bloom import BloomFilter
from scrapy_bloom.filters.hashing import Hashed, make_hasher
from scrapy_bloom.filters.sizing import MAX_HASHES
from scrapy_bloom.generations.lifecycle import LifeCycle
from scrapy_bloom.generations.memory import Lookup
from scrapy_bloom.generations.policy import Generation, Origin, Policy
from scrapy_bloom.redis.connection.server import RedisServer
from scrapy_bloom.redis.layout import bitmap_key, block_key, blocks_prefix, keys_of
from scrapy_bloom.redis.lua_scripts import packed, reply_of, script
from scrapy_bloom.redis.stored import (
    RedisGeneration,
    Stored,
    change,
    described,
    made_keys,
    read_stored,
    remove_blocks,
    remove_filter,
)

NEW = "n"  # the answer for a new fingerprint; another answer is the place of a generation
MAX_MIRROR_BYTES = 1 << 30  # of all generations together; further generations have no mirror
_MOST_RECENT = 65_536  # 6 MB of fingerprints
_MADE_AT_ONCE = 48  # keys of 120 KiB that one script makes, so that it takes less than 5 ms
_WORKERS_STAY_SECS = 30 * 86_400.0  # how long the field of a worker stays that was killed


class OtherFilterError(StorageError):
    """The filter was removed, lost or replaced, so the mirrors are no longer valid."""


class LostKeysError(OtherFilterError):
    """The server has lost a part of the filter, or of its queue, so the crawl must start over."""


class Answers(NamedTuple):
    """The answers to a command."""

    letters: str  # for each fingerprint, NEW, or the place of the generation that has it
    is_repeated: bool  # whether the command was executed twice, because a reply was lost
    has_lost: bool  # whether the server has lost commands before this one


class SharedFilter:
    """A filter in Redis, with mirrors of its bits in memory; implements `Generations`.

    Attributes:
        life: adds and removes the generations.
        id: the id of the filter; a filter that replaces it has another id.
        salt: its salt.
        live: the generations, oldest first.
        mirror_hits: how often `knows` has found a fingerprint.
        sample: a sample of fingerprints; the event loop sets it, and a thread may store it.
    """

    def __init__(
        self,
        server: RedisServer,
        key: str,
        policy: Policy,
        origin: Origin,
        *,
        mirror: bool = True,
    ) -> None:
        self.server = server
        self.key = key
        self.keys = keys_of(key)
        self.name = f"the filter {key!r} in {server.address}"
        self.version = ""
        self.salt = b""
        self.mirror_hits = 0
        self.sample = self._stored_sample = ""
        self._policy = policy
        self._origin = replace(origin, error_rate=policy.error_rate)
        self._mirror = mirror
        self._server_ahead = 0.0  # the server's clock minus our monotonic clock
        # Commands are numbered, to detect a server that has lost some, and lost replies.
        self._worker = f"seen:{time.time():.0f}:{secrets.token_hex(4)}"
        self._number = 0
        self.life = LifeCycle(policy, self)
        self._reset()

    # Joining.

    def _reset(self) -> None:
        self.id = ""
        self.live: Sequence[RedisGeneration] = ()
        self._lookup = Lookup(b"", (), ())
        self._described = b""  # the argument of `record` that is always the same
        self._number = 0

    def join(self) -> None:
        """Join the filter, or create it."""
        self._reset()
        self._server_ahead = self.server.now() - time.monotonic()
        while (stored := read_stored(self.server, self.key)) is None:
            self._create()
        theirs, ours = stored.origin.fingerprinter, self._origin.fingerprinter
        if theirs != ours:
            raise FingerprinterMismatchError.of(self.name, theirs, ours, "another BLOOM_REDIS_KEY")
        self._adopt(stored)

    def begin_run(self, run_at: float) -> None:
        """Turn and expire what is due when a run begins; raises OtherFilterError."""
        while not self.life.begin_run(run_at):
            pass  # another crawl has changed the generations

    def refresh(self) -> None:
        """Read the current generations; raises OtherFilterError."""
        stored = read_stored(self.server, self.key)
        if stored is None or stored.id != self.id:
            raise self._lost()
        self._adopt(stored)

    def _adopt(self, stored: Stored) -> None:
        # This comes first: if it fails, the next batch is refused, and it is done again.
        remove_blocks(self.server, self.key, stored.unlinked)
        oldest = time.time() - _WORKERS_STAY_SECS
        left = [f"unlink:{generation_id}" for generation_id in stored.unlinked]
        left += [name for name, began in stored.workers.items() if began < oldest]
        if left:
            self.server.send("HDEL", self.key, *left)
        known = {generation.id: generation for generation in self.live}
        live = []
        for generation in stored.generations:
            same = known.get(generation.id, generation)
            same.count, same.last_run = generation.count, generation.last_run
            live.append(same)
        newest = live[-1]
        if not newest.made:
            bitmap = self.server.send("GET", bitmap_key(self.key, newest.id))
            newest.made.update(made_keys(bitmap or b""))
        self.id, self.version, self.salt = stored.id, stored.version, stored.origin.salt
        if not self.sample:
            self.sample = self._stored_sample = stored.sample
        self._use(live)
        self.life.plan()

    def _use(self, live: Sequence[RedisGeneration]) -> None:
        """Use these generations from now on, and mirror them."""
        if self._mirror:
            _add_mirrors(live, self.salt)
        mirrors = [generation.mirror for generation in live if generation.mirror is not None]
        # The event loop may be using the last one.
        self._lookup = Lookup(self.salt, live, mirrors, _MOST_RECENT)
        self._locate_all = make_hasher(self.salt, MAX_HASHES)
        self.live = live
        self._described = packed({**self.arguments, "id": self.id, "worker": self._worker})

    def _create(self) -> None:
        """Create the filter, unless another crawl has created it."""
        new = RedisGeneration.of(self._policy.first(self.now()))
        filter_id, text = secrets.token_hex(8), described(self._origin)
        fields = {"id": filter_id, "filter": text, **new.fields}
        change(self.server, self.key, ("", ""), fields, added=[new])

    # Scripts.

    def step(self, name: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """Run a script of the queue, and return its reply; raises OtherFilterError."""
        words = packed({"id": self.id, **values})
        answer = reply_of(self.server.script(script(name), self.keys, words))
        if answer["status"] == b"other":
            raise self._lost()
        return answer

    def _lost(self) -> OtherFilterError:
        return OtherFilterError(f"{self.name} was removed, or lost")

    @property
    def arguments(self) -> dict[str, Any]:
        """Return the arguments of a batch that describe the filter."""
        return {
            "version": self.version,
            "count_field": f"count:{self.live[-1].number}",
            "generations": [
                {"prefix": blocks_prefix(self.key, generation.id), **generation.geometry._asdict()}
                for generation in self.live
            ],
        }

    def bits_of(self, fingerprint: bytes) -> bytes:
        """Return the bits of a fingerprint as scripts take them; they are valid for this batch."""
        return _packed_bits(self._lookup.hashed(fingerprint))

    def lasting_bits_of(self, fingerprint: bytes) -> bytes:
        """Return the bits of a fingerprint, which are valid for all generations to come."""
        return _packed_bits(self._locate_all(fingerprint))

    def knows(self, fingerprint: bytes) -> bool:
        """Return whether a mirror has a fingerprint; the server is not asked."""
        is_known = fingerprint in self._lookup
        self.mirror_hits += is_known
        return is_known

    def add_to_mirror(self, fingerprint: bytes, answer: str) -> None:
        """Add a fingerprint to the mirror of the generation that has it, by the server's answer."""
        mirror = self.live[-1 if answer == NEW else ord(answer) - 1].mirror
        if mirror is not None:
            self._lookup.add(fingerprint, mirror)

    def exchange(self, fingerprints: Sequence[bytes], *, records: bool) -> Answers:
        """Look fingerprints up, and record them if `records`; raises OtherFilterError."""
        while True:
            bits = map(self.bits_of, fingerprints)
            words = (self._described, self._number + 1, int(records), *bits)
            # The keys of blocks are declared: while a slot moves to another node, a Cluster refuses
            # the script, and it is tried again. Otherwise, the keys would seem to be lost.
            keys = dict.fromkeys([self.key, *self._block_keys(fingerprints)])
            answer = self.server.script(script("record"), list(keys), *words)
            if answer[0] == b"ok":
                break
            if answer[0] == b"lost":
                raise LostKeysError(f"{self.server.address} has lost keys of {self.name}")
            if answer[0] == b"other":
                raise self._lost()
            self.refresh()  # raises an OtherFilterError if the filter was replaced
        _, letters, count, last = answer
        before, self._number = self._number, self._number + 1
        is_repeated = last == self._number
        answers = Answers(letters.decode(), is_repeated, last not in (before, self._number))
        if last != before:
            self.drop_mirrors()
        for fingerprint, letter in zip(fingerprints, answers.letters, strict=True):
            if records or letter != NEW:
                self.add_to_mirror(fingerprint, letter)
        self.update_count(count)
        return answers

    def _block_keys(self, fingerprints: Sequence[bytes]) -> Iterator[str]:
        for fingerprint in fingerprints:
            block_hash, _ = self._lookup.hashed(fingerprint)
            for generation in self.live:
                yield block_key(self.key, generation.id, generation.chunk_of(block_hash))

    def make_keys(self, fingerprints: Iterable[bytes]) -> None:
        """Make keys of the newest generation that a batch with these fingerprints may need.

        The script of the batch makes what is missing then, but many would take it too long.
        """
        newest = self.live[-1]
        if len(newest.made) == newest.num_chunks:
            return
        hashed = map(self._lookup.hashed, fingerprints)
        needed = {newest.chunk_of(block_hash) for block_hash, _ in hashed}
        missing = sorted(needed - newest.made)
        for start in range(0, len(missing), _MADE_AT_ONCE):
            chunks = missing[start : start + _MADE_AT_ONCE]
            values = {**self.arguments, "id": self.id, "chunks": chunks}
            values["generations"] = values["generations"][-1:]
            self.server.script(script("make"), [self.key], packed(values))
        newest.made.update(missing)

    def update_count(self, count: bytes | int | None) -> None:
        """Keep the count of the newest generation that a batch has returned."""
        self.live[-1].count = int(count or 0)

    def clear(self) -> None:
        """Remove the filter, or what is left of it, for all crawlers; `join` must follow."""
        remove_filter(self.server, self.key, self.id)
        self._reset()

    def drop_mirrors(self) -> None:
        """Start with empty mirrors, because the server may have lost bits."""
        for generation in self.live:
            generation.mirror = None
            generation.made.clear()
        self._use(self.live)

    def leave(self) -> None:
        """Remove the number of the last command from the hash."""
        if self._number:
            self.server.send("HDEL", self.key, self._worker)

    def store_sample(self) -> None:
        """Store the sample if this crawl has changed it."""
        if (sample := self.sample) != self._stored_sample:
            self._stored_sample = sample
            self._change({"sample": sample})

    def keep_up(self) -> None:
        """Add a generation, or begin a run by the time, if that is due; store a new sample."""
        self.store_sample()
        if self.now() >= self.life.due_at:
            self.life.begin_run(self.now())
        if self.life.is_full():
            self.life.grow()

    # The methods of `Generations`.

    def now(self) -> float:
        """Return the server's time in seconds since 1970."""
        return time.monotonic() + self._server_ahead

    def update(self, run_at: float, new: Generation | None = None, expired: int = 0) -> bool:
        """Change the generations for all crawlers, as `Generations.update` says."""
        newest, gone = self.live[-1], self.live[:expired]
        fields = {f"unlink:{generation.id}": "" for generation in gone}
        numbers = [generation.number for generation in gone]
        removed = [f"{kind}:{number}" for number in numbers for kind in ("gen", "count")]
        if new is None:
            name = f"gen:{newest.number}"
            fields[name] = replace(newest, last_run=run_at).fields[name]
            return self._change(fields, removed)
        added = RedisGeneration.of(new)
        return self._change({**fields, **added.fields}, removed, [added])

    def _change(
        self,
        fields: Mapping[str, str],
        removed: Sequence[str] = (),
        added: Sequence[RedisGeneration] = (),
    ) -> bool:
        """Change fields of the hash; return False if another crawl has changed the generations."""
        answer = change(
            self.server,
            self.key,
            (self.id, self.version),
            fields,
            removed=removed,
            added=added,
        )
        if answer == "other":
            raise self._lost()
        self.refresh()
        return answer == "ok"


def _packed_bits(hashed: Hashed) -> bytes:
    block_hash, positions = hashed
    return struct.pack(f">Q{len(positions)}H", block_hash, *positions)[2:]  # 48 of 64 bits


def _add_mirrors(live: Sequence[RedisGeneration], salt: bytes) -> None:
    """Give live generations mirrors, the newest first, within MAX_MIRROR_BYTES."""
    used = sum(generation.geometry.nbytes for generation in live if generation.mirror is not None)
    for generation in reversed(live):
        size, geometry = (generation.capacity, generation.error_rate), generation.geometry
        if generation.mirror is None and used + geometry.nbytes <= MAX_MIRROR_BYTES:
            used += geometry.nbytes
            generation.mirror = BloomFilter(*size, salt=salt, geometry=geometry)
