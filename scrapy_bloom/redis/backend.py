"""The backend for a filter in Redis or Valkey that many crawlers share."""

import logging
import math
import time
from collections.abc import Mapping, Sequence
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
from scrapy_bloom.filters.hashing import make_hasher
from scrapy_bloom.filters.sizing import MAX_HASHES
from scrapy_bloom.generations.memory import Lookup
from scrapy_bloom.generations.policy import (
    FilterStatus,
    Generation,
    LifeCycle,
    Origin,
    Policy,
)
from scrapy_bloom.redis.layout import keys_of
from scrapy_bloom.redis.server import RedisServer, next_attempt
from scrapy_bloom.redis.stored import (
    MOST_AT_ONCE,
    RedisGeneration,
    Stored,
    change,
    create,
    packed_bits,
    read_stored,
    remove_blocks,
    remove_filter,
)
from scrapy_bloom.text import escaped

logger = logging.getLogger(__name__)

NEW = 0  # the answer for a new fingerprint; another answer is the place of a generation, from 1 on
MAX_MIRROR_BYTES = 1 << 30  # of all generations together; further generations have no mirror
_MOST_RECENT = 65_536  # 6 MB of fingerprints
_MOST_LOSSES = 10  # in a row: each at most so many seconds after the one before
_QUIET_SECS = 60.0


class LostFilterError(StorageError):
    """The filter was removed or replaced, or lost with or without its queue, or a part of them."""


class RedisBackend(LifeCycle):
    """A Bloom filter in Redis that many crawlers share, which also have the policy in common.

    A mirror in memory holds the bits known to be set, so a fingerprint that it has is a duplicate,
    without asking the server. Otherwise one script looks the fingerprint up and records it. The
    class has the methods of `MemoryBackend`, as described there.

    Attributes:
        stored: the filter, as it was read last.
        live: the generations, oldest first.
        sample: a sample of fingerprints; the event loop sets it, and a thread may store it.
    """

    stored: Stored
    _trust_secs = 1.0  # how long a mirror answers without a reply of the server
    _losses_in_a_row = 0
    _lost_at = -math.inf  # on a monotonic clock
    _ask_at = 0.0  # when to ask the server about a duplicate, on a monotonic clock

    def __init__(
        self, server: RedisServer, key: str, policy: Policy, origin: Origin, *, mirror: bool = True
    ) -> None:
        super().__init__(policy)
        self.server = server
        self.key = key
        self.location = f"{server.address}, key {escaped(key)}"
        self.keys = keys_of(key)
        self.name = f"the filter {key!r} in {server.address}"
        self._mirror_hits = 0
        self.sample = self._stored_sample = ""
        self._origin = replace(origin, error_rate=policy.error_rate)
        self._mirror_bytes = MAX_MIRROR_BYTES if mirror else 0
        self._server_ahead = 0.0  # the server's clock minus our monotonic clock
        self._reset()

    # As the backend of a crawl.

    def open(self) -> None:
        """Connect, and join the filter, or create it; raises StorageError."""
        self.join()
        self.log_kept_settings()
        self._send([])  # so that a refusal is reported now, not at the first request

    def begin(self) -> None:
        try:
            self.begin_run(self.now())
        except LostFilterError:
            self.start_over()

    def add(self, fingerprint: bytes) -> bool:
        """Record a fingerprint; return whether it was new to all crawlers.

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
            few = min(MOST_AT_ONCE, max(1, self.live[-1].capacity // 100))
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
        return not self._must_ask(time.monotonic()) and self.knows(fingerprint)

    def _must_ask(self, now: float) -> bool:
        """Return whether to ask the server about a fingerprint that a mirror has.

        A crawl that meets only duplicates notices in this way that the server has lost the filter,
        or that a part of a window has ended.
        """
        return now >= self._ask_at or bool(self._policy.window and self.now() >= self.due_at)

    def _send(
        self, fingerprints: Sequence[bytes], *, records: bool = True
    ) -> tuple[list[int], bool]:
        """Look fingerprints up, and record them if `records`; if the filter is lost, start over.

        Returns for each fingerprint NEW, or the place of the generation that has it; and whether
        that is certain: the command was not repeated, so no reply was lost.
        """
        while True:  # `start_over` gives up
            try:
                if not self.live:
                    self.join()
                self.keep_up()
                bits = [*map(self.bits_of, fingerprints)]
                values = {**self.stored.arguments, "bits": bits, "records": records}
                retries = self.server.retries
                reply = self.run("record", values, self.stored.record_keys)
                if reply["status"] == b"ok":
                    break
                self.refresh()
            except LostFilterError:
                self.start_over()
        self._ask_at = time.monotonic() + self._trust_secs
        places, self.live[-1].count = reply["places"], reply["count"]
        for fingerprint, place in zip(fingerprints, places, strict=True):
            if records or place != NEW:
                self.add_to_mirror(fingerprint, place)
        return places, self.server.retries == retries

    def start_over(self) -> None:
        """Join the filter again, or create it, after a LostFilterError.

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
        self.clear()
        self.join()

    def close(self) -> None:
        self.server.shorten_deadline()
        try:
            if self.live:
                with suppress(StorageError):
                    self.refresh()  # for the counts of other crawlers
                    self.store_sample()
        finally:
            self.server.close()

    def status(self) -> FilterStatus:
        return replace(
            super().status(),
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
        self._mirrors: dict[str, BloomFilter] = {}  # the bits known to be set, by generation
        self._lookup = Lookup(b"", (), ())

    def join(self) -> None:
        """Join the filter, or create it."""
        self._reset()
        self._server_ahead = self.server.now() - time.monotonic()
        while (stored := read_stored(self.server, self.key)) is None:
            new = RedisGeneration(**vars(self._policy.first(self.now())))
            create(self.server, self.key, self._origin, [new])  # unless another crawl was faster
        theirs, ours = stored.origin.fingerprinter, self._origin.fingerprinter
        if theirs != ours:
            raise FingerprinterMismatchError.of(self.name, theirs, ours, "another BLOOM_REDIS_KEY")
        self._adopt(stored)

    def begin_run(self, run_at: float) -> None:
        """Turn and expire what is due when a run begins; raises LostFilterError."""
        while not self.turn(run_at):
            pass  # another crawl has changed the generations

    def refresh(self) -> None:
        """Read the current generations; raises LostFilterError."""
        stored = read_stored(self.server, self.key)
        if stored is None or stored.id != self.id:
            raise LostFilterError(f"{self.name} was lost")
        self._adopt(stored)

    def _adopt(self, stored: Stored) -> None:
        # This comes first: if it fails, the next batch is refused, and it is done again.
        remove_blocks(self.server, self.key, stored.unlinked)
        if fields := [f"unlink:{generation_id}" for generation_id in stored.unlinked]:
            self.server.send("HDEL", self.key, *fields)
        self.id, self.stored = stored.id, stored
        if not self.sample:
            self.sample = self._stored_sample = stored.sample
        self._use(stored.generations)
        self.plan()

    def _use(self, live: Sequence[RedisGeneration]) -> None:
        """Use these generations from now on, and mirror those that have room, the newest first."""
        former, self._mirrors, room = self._mirrors, {}, self._mirror_bytes
        salt = self.stored.origin.salt
        for new in reversed(live):
            if new.geometry.nbytes <= room:
                room -= new.geometry.nbytes
                self._mirrors[new.id] = former.get(new.id) or BloomFilter(
                    new.capacity, new.error_rate, salt=salt, geometry=new.geometry
                )
        mirrors = [*self._mirrors.values()][::-1]
        self._lookup = Lookup(salt, live, mirrors, _MOST_RECENT)  # the event loop may use the last
        self._locate_all = make_hasher(salt, MAX_HASHES)
        self.live = live

    # Scripts.

    def run(
        self, name: str, values: Mapping[str, Any], keys: Sequence[str] = ()
    ) -> Mapping[str, Any]:
        """Run a script, usually with the keys of the queue; raises LostFilterError."""
        reply = self.server.run(name, keys or self.keys, {"id": self.id, **values})
        if reply["status"] in (b"other", b"lost"):
            raise LostFilterError(f"{self.name} was lost")
        return reply

    def bits_of(self, fingerprint: bytes) -> bytes:
        """Return the bits of a fingerprint as scripts take them; they are valid for this batch."""
        return packed_bits(self._lookup.hashed(fingerprint))

    def lasting_bits_of(self, fingerprint: bytes) -> bytes:
        """Return the bits of a fingerprint, which are valid for all generations to come."""
        return packed_bits(self._locate_all(fingerprint))

    def knows(self, fingerprint: bytes) -> bool:
        """Return whether a mirror has a fingerprint; the server is not asked."""
        is_known = fingerprint in self._lookup
        self._mirror_hits += is_known
        return is_known

    def add_to_mirror(self, fingerprint: bytes, place: int) -> None:
        """Add a fingerprint to the mirror of the generation that has it, by the server's answer."""
        # A new one is in the newest.
        if mirror := self._mirrors.get(self.live[place - 1].id):
            self._lookup.add(fingerprint, mirror)

    def clear(self) -> None:
        remove_filter(self.server, self.key, self.id)
        self._reset()

    def drop_mirrors(self) -> None:
        """Start with empty mirrors, because the server may have lost bits."""
        self._mirrors = {}
        self._use(self.live)

    def store_sample(self) -> None:
        """Store the sample if this crawl has changed it."""
        if (sample := self.sample) != self._stored_sample:
            self._stored_sample = sample
            self._change({"sample": sample})

    def keep_up(self) -> None:
        """Add a generation, or begin a run by the time, if that is due; store a new sample."""
        self.store_sample()
        if self.now() >= self.due_at:
            self.turn(self.now())
        if self.is_full():
            self.grow()

    # As a storage of generations.

    def now(self) -> float:
        """Return the server's time in seconds since 1970."""
        return time.monotonic() + self._server_ahead

    def update(self, run_at: float, new: Generation | None = None, expired: int = 0) -> bool:
        newest, gone = self.live[-1], self.live[:expired]
        fields = {f"unlink:{generation.id}": "" for generation in gone}
        numbers = [generation.number for generation in gone]
        removed = [f"{kind}:{number}" for number in numbers for kind in ("gen", "count")]
        if new is None:
            name = f"gen:{newest.number}"
            fields[name] = replace(newest, last_run=run_at).fields[name]
            return self._change(fields, removed)
        return self._change(fields, removed, [RedisGeneration(**vars(new))])

    def _change(
        self,
        fields: Mapping[str, str],
        removed: Sequence[str] = (),
        added: Sequence[RedisGeneration] = (),
    ) -> bool:
        """Change fields of the hash; return False if another crawl has changed the generations."""
        known = self.id, self.stored.version
        status = change(self.server, self.key, known, fields, removed=removed, added=added)
        if status == "other":
            raise LostFilterError(f"{self.name} was lost")
        self.refresh()
        return status == "ok"
