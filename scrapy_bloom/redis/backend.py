"""The backend for a filter in Redis or Valkey that many crawlers share.

Each change of the generations gives the filter a new version, and each script names the version
that it expects. So no bit is set in a generation that has ended.
"""

import logging
import math
import secrets
import struct
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from scrapy_bloom.exceptions import (
    FingerprinterMismatchError,
    OutageError,
    RefusedError,
    StorageError,
)
from scrapy_bloom.filters.bloom import BloomFilter
from scrapy_bloom.filters.hashing import Hashed, make_hasher
from scrapy_bloom.filters.sizing import MAX_HASHES
from scrapy_bloom.generations.memory import Lookup
from scrapy_bloom.generations.policy import (
    FilterStatus,
    Generation,
    LifeCycle,
    Origin,
    Policy,
    kept_settings,
)
from scrapy_bloom.redis.connection.server import RedisServer, next_attempt
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
from scrapy_bloom.text import escaped

logger = logging.getLogger(__name__)

NEW = 0  # the answer for a new fingerprint; another answer is the place of a generation, from 1 on
MAX_MIRROR_BYTES = 1 << 30  # of all generations together; further generations have no mirror
_MOST_RECENT = 65_536  # 6 MB of fingerprints
_MADE_AT_ONCE = 48  # keys of 120 KiB that one script makes, so that it takes less than 5 ms
_AT_ONCE = 32  # fingerprints recorded by one script, so that it takes less than 5 ms
_MOST_LOSSES = 10  # in a row: each at most so many seconds after the one before
_QUIET_SECS = 60.0


class OtherFilterError(StorageError):
    """The filter was removed, lost or replaced, so the mirrors are no longer valid."""


class LostKeysError(OtherFilterError):
    """The server has lost a part of the filter, or of its queue, so the crawl must start over."""


class RedisBackend:
    """A Bloom filter in Redis that many crawlers share, which also have the policy in common.

    A mirror in memory holds the bits known to be set. Bits only change from 0 to 1, so a
    fingerprint that the mirror has is a duplicate, without asking the server. Otherwise one script
    looks the fingerprint up and records it. Mirrors take as much memory as the filter, up to 1 GiB.
    The class implements `Generations`, too.

    Attributes:
        live: the generations, oldest first.
        sample: a sample of fingerprints; the event loop sets it, and a thread may store it.
    """

    _trust_secs = 1.0  # how long a mirror answers without a reply of the server
    _losses_in_a_row = 0
    _lost_at = -math.inf  # on a monotonic clock
    _ask_at = 0.0  # when to ask the server about a duplicate, on a monotonic clock

    def __init__(
        self, server: RedisServer, key: str, policy: Policy, origin: Origin, *, mirror: bool = True
    ) -> None:
        self.server = server
        self.key = key
        self.keys = keys_of(key)
        self.name = f"the filter {key!r} in {server.address}"
        self.version = ""
        self.salt = b""
        self._mirror_hits = 0
        self.sample = self._stored_sample = ""
        self._policy = policy
        self._origin = replace(origin, error_rate=policy.error_rate)
        self._mirror = mirror
        self._server_ahead = 0.0  # the server's clock minus our monotonic clock
        self._life = LifeCycle(policy, self)
        self._reset()

    # As the backend of a crawl.

    def open(self) -> None:
        """Connect, and join the filter, or create it; raises StorageError."""
        self.join()
        if differences := kept_settings(self._policy, self.live):
            logger.info(
                "This crawl joins %s, which was created with other settings and keeps them: %s. "
                "The settings of this crawl apply to new generations only; give all crawlers that "
                "share a filter the same settings",
                self.name,
                ", ".join(differences),
            )
        self._send([])  # so that a refusal is reported now, not at the first request

    def begin(self) -> None:
        """Begin a run, of this crawl alone."""
        try:
            self.begin_run(self.now())
        except OtherFilterError as error:
            self.start_over(error)

    def add(self, fingerprint: bytes) -> bool:
        """Record a fingerprint; return whether it was new to all crawlers; raises StorageError.

        If a reply was lost, the fingerprint counts as new, so that its request is crawled again
        rather than skipped.
        """
        is_known, begun = self.knows(fingerprint), time.monotonic()
        if is_known and not self._must_ask(begun):
            return False
        try:
            (place,), is_certain = self._send([fingerprint])
        except OutageError:
            if not self.knows(fingerprint):  # or it knew it, but the filter was lost since
                raise
            # A duplicate needs no server. The next new request will wait for it, or fail.
            self._ask_at = next_attempt(begun, self._trust_secs)
            return False
        return place == NEW or not is_certain

    def add_many(self, fingerprints: Sequence[bytes]) -> int:
        """Record fingerprints, many per round trip; return how many were certainly new."""
        added = start = 0
        while start < len(fingerprints):
            # In steps of 1 % of the capacity, so that the newest generation is not overfilled.
            few = min(_AT_ONCE, max(1, self.live[-1].capacity // 100))
            places, _ = self._send(fingerprints[start : start + few])
            added += places.count(NEW)
            start += few
        return added

    def __contains__(self, fingerprint: bytes) -> bool:
        if self.is_duplicate(fingerprint):
            return True
        (place,), _ = self._send([fingerprint], records=False)
        return place != NEW

    def is_duplicate(self, fingerprint: bytes) -> bool:
        """Return whether `add` would certainly return False, without asking the server."""
        return not self._must_ask(time.monotonic()) and self.knows(fingerprint)

    def _must_ask(self, now: float) -> bool:
        """Return whether to ask the server about a fingerprint that a mirror has.

        A crawl that meets only duplicates notices in this way that the server has lost the filter,
        or that a part of a window has ended.
        """
        return now >= self._ask_at or bool(self._policy.window and self.now() >= self._life.due_at)

    def _send(
        self, fingerprints: Sequence[bytes], *, records: bool = True
    ) -> tuple[list[int], bool]:
        """Send fingerprints to the server, as `exchange`; start over if it has lost the filter."""
        while True:  # `start_over` gives up
            try:
                if not self.live:
                    self.join()
                self.keep_up()
                answers = self.exchange(fingerprints, records=records)
            except OtherFilterError as error:
                self.start_over(error)
                continue
            self._ask_at = time.monotonic() + self._trust_secs
            return answers

    def start_over(self, error: OtherFilterError) -> None:
        """Continue after the server has lost the filter, or a part of it.

        Raises a RefusedError if that happens again and again.
        """
        if self.live:
            now = time.monotonic()
            is_soon = now <= self._lost_at + _QUIET_SECS
            self._losses_in_a_row = self._losses_in_a_row + 1 if is_soon else 1
            self._lost_at = now
            if self._losses_in_a_row >= _MOST_LOSSES:
                raise RefusedError(
                    f"{self.name} was lost {_MOST_LOSSES} times in a row, so the crawl would never "
                    "end: check the server's maxmemory and maxmemory-policy (noeviction), and what "
                    "else removes its keys"
                )
            logger.warning(
                "%s was lost: removed, flushed, evicted, or not saved before a restart. The crawl "
                "starts over with an empty filter; check persistence (appendonly yes) and "
                "maxmemory-policy (noeviction)",
                self.name[0].upper() + self.name[1:],
            )
        if isinstance(error, LostKeysError):
            self.clear()
        self.join()

    def close(self) -> None:
        """Disconnect; raises StorageError."""
        self.server.shorten_deadline()
        try:
            if self.live:
                with suppress(StorageError):
                    self.refresh()  # for the counts of other crawlers
                    self.store_sample()
        finally:
            self.server.close()

    def status(self) -> FilterStatus:
        """Return the filter's current figures; after `close`, the last ones."""
        location = f"{self.server.address}, key {escaped(self.key)}"
        return replace(
            self._life.status(location),
            more={
                "redis/round_trips": self.server.round_trips,
                "redis/mirror_hits": self._mirror_hits,
                "redis/retries": self.server.retries,
            },
        )

    # Joining.

    def _reset(self) -> None:
        self.id = ""
        self.live: Sequence[RedisGeneration] = ()
        self._lookup = Lookup(b"", (), ())
        self._described = b""  # the argument of `record` that is always the same

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
        while not self._life.begin_run(run_at):
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
        if fields := [f"unlink:{generation_id}" for generation_id in stored.unlinked]:
            self.server.send("HDEL", self.key, *fields)
        known = {generation.id: generation for generation in self.live}
        for generation in stored.generations:
            if former := known.get(generation.id):
                generation.mirror, generation.made = former.mirror, former.made
        newest = stored.generations[-1]
        if not newest.made:
            bitmap = self.server.send("GET", bitmap_key(self.key, newest.id))
            newest.made.update(made_keys(bitmap or b""))
        self.id, self.version, self.salt = stored.id, stored.version, stored.origin.salt
        if not self.sample:
            self.sample = self._stored_sample = stored.sample
        self._use(stored.generations)
        self._life.plan()

    def _use(self, live: Sequence[RedisGeneration]) -> None:
        """Use these generations from now on, and mirror them."""
        if self._mirror:
            self._add_mirrors(live)
        mirrors = [generation.mirror for generation in live if generation.mirror is not None]
        # The event loop may be using the last one.
        self._lookup = Lookup(self.salt, live, mirrors, _MOST_RECENT)
        self._locate_all = make_hasher(self.salt, MAX_HASHES)
        self.live = live
        self._described = packed({**self.arguments, "id": self.id})

    def _add_mirrors(self, live: Sequence[RedisGeneration]) -> None:
        """Give live generations mirrors, the newest first, within MAX_MIRROR_BYTES."""
        mirrored = [generation for generation in live if generation.mirror is not None]
        used = sum(generation.geometry.nbytes for generation in mirrored)
        for generation in reversed(live):
            size, geometry = (generation.capacity, generation.error_rate), generation.geometry
            if generation.mirror is None and used + geometry.nbytes <= MAX_MIRROR_BYTES:
                used += geometry.nbytes
                generation.mirror = BloomFilter(*size, salt=self.salt, geometry=geometry)

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
        self._mirror_hits += is_known
        return is_known

    def add_to_mirror(self, fingerprint: bytes, place: int) -> None:
        """Add a fingerprint to the mirror of the generation that has it, by the server's answer."""
        mirror = self.live[place - 1].mirror  # a new one is in the newest
        if mirror is not None:
            self._lookup.add(fingerprint, mirror)

    def exchange(self, fingerprints: Sequence[bytes], *, records: bool) -> tuple[list[int], bool]:
        """Look fingerprints up, and record them if `records`; raises OtherFilterError.

        Returns for each fingerprint NEW, or the place of the generation that has it; and whether
        that is certain: the command was not repeated, so no reply was lost.
        """
        retries = self.server.retries
        while True:
            hashed = [self._lookup.hashed(fingerprint) for fingerprint in fingerprints]
            words = (self._described, int(records), *map(_packed_bits, hashed))
            # The keys of blocks are declared: while a slot moves to another node, a Cluster refuses
            # the script, and it is tried again. Otherwise, the keys would seem to be lost.
            blocks = (
                block_key(self.key, generation.id, generation.chunk_of(block_hash))
                for block_hash, _ in hashed
                for generation in self.live
            )
            keys = list(dict.fromkeys([self.key, *blocks]))
            status, *answer = self.server.script(script("record"), keys, *words)
            if status == b"ok":
                break
            if status == b"lost":
                raise LostKeysError(f"{self.server.address} has lost keys of {self.name}")
            if status == b"other":
                raise self._lost()
            self.refresh()  # raises an OtherFilterError if the filter was replaced
        places, self.live[-1].count = answer
        for fingerprint, place in zip(fingerprints, places, strict=True):
            if records or place != NEW:
                self.add_to_mirror(fingerprint, place)
        return places, self.server.retries == retries

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

    def store_sample(self) -> None:
        """Store the sample if this crawl has changed it."""
        if (sample := self.sample) != self._stored_sample:
            self._stored_sample = sample
            self._change({"sample": sample})

    def keep_up(self) -> None:
        """Add a generation, or begin a run by the time, if that is due; store a new sample."""
        self.store_sample()
        if self.now() >= self._life.due_at:
            self._life.begin_run(self.now())
        if self._life.is_full():
            self._life.grow()

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
        known = self.id, self.version
        answer = change(self.server, self.key, known, fields, removed=removed, added=added)
        if answer == "other":
            raise self._lost()
        self.refresh()
        return answer == "ok"


def _packed_bits(hashed: Hashed) -> bytes:
    block_hash, positions = hashed
    return struct.pack(f">Q{len(positions)}H", block_hash, *positions)[2:]  # 48 of 64 bits
