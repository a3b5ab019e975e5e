"""The access of one crawl to a filter in Redis: generations and mirrors.

Each change of the generations gives the filter a new version, and each script names the version
that it expects. So no bit is set in a generation that has ended.
"""

import math
import mmap
import secrets
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any, NamedTuple

from scrapy_bloom.exceptions import FingerprinterMismatchError, StorageError
from scrapy_bloom.filters.bloom import BloomFilter
from scrapy_bloom.filters.hashing import Hashed, block_of, checked_salt, make_hasher
from scrapy_bloom.filters.sizing import MAX_HASHES
from scrapy_bloom.generations.lifecycle import LifeCycle, NoRoomError
from scrapy_bloom.generations.memory import Recent
from scrapy_bloom.generations.policy import Generation, Origin, Policy, Size, window_of
from scrapy_bloom.redis import scripts
from scrapy_bloom.redis.batch_script import RECORD
from scrapy_bloom.redis.connection.server import RedisServer
from scrapy_bloom.redis.layout import RECORD as RECORD_FIELDS
from scrapy_bloom.redis.layout import keys_of, words_of
from scrapy_bloom.redis.making import Maker, finish, remove_filter
from scrapy_bloom.redis.scripts import CHUNK_BLOCKS, block_key, blocks_prefix
from scrapy_bloom.redis.stored import (
    RedisGeneration,
    Stored,
    described,
    read_existing,
    read_stored,
)

NEW = "n"  # the answer for a new fingerprint; another answer is the place of a generation
MAX_MIRROR_BYTES = 1 << 30  # of all generations together; further generations have no mirror
_ALL_BITS = struct.Struct(f">HI{MAX_HASHES}H")
_LOW = 0xFFFFFFFF
_MOST_RECENT = 65_536  # 6 MB of fingerprints
_POLL_SECS = 0.1
_START_PATIENCE_SECS = 3600.0  # while another crawl makes the first generation


class OtherFilterError(StorageError):
    """The filter was removed, lost or replaced, so the mirrors are no longer valid."""


class LostKeysError(OtherFilterError):
    """The server has lost a part of the filter, or of its queue, so the crawl must start over."""


class WentBackError(OtherFilterError):
    """The server has lost the latest changes, so the mirrors are no longer valid."""


class _Bits(NamedTuple):
    """Where the bits of fingerprints are: in the mirrors, and in the keys of the generations."""

    locate: Callable[[bytes], Hashed]
    recent: Recent
    locate_all: Callable[[bytes], Hashed]  # with as many positions as any later generation needs
    mirrors: Sequence[BloomFilter] = ()  # the newest first
    pack: Callable[..., bytes] = struct.pack  # packs the two parts of a block hash, and positions


class SharedFilter:
    """A filter in Redis, with mirrors of its bits in memory; implements `Generations`.

    Args:
        server: the connection.
        key: the name of the filter's hash.
        policy: the size of the filter, and when it grows and expires.
        origin: the fingerprinter, the spider and the salt.
        mirror: whether to mirror the bits, which takes as much memory as the filter, up to 1 GiB.

    Attributes:
        life: adds, ends and removes the generations.
        id: the id of the filter; a filter that replaces it has another id.
        salt: its salt.
        live: the generations, oldest first.
        kept_from: number of the first generation that must not end, because the crawl of a shared
            queue, or this crawl, has recorded in it; infinite if there is none.
        mirror_hits: how often `knows` has found a fingerprint.
        run_from: number of the first generation that this crawl has recorded in.
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
        self.kept_from = self.run_from = math.inf
        self.mirror_hits = 0
        self.sample = self._stored_sample = ""
        self._policy = policy
        self._origin = origin
        self._mirror = mirror
        self._server_ahead = 0.0  # the server's clock minus our monotonic clock
        # Replies feed the mirrors. So batches are numbered, to detect a server that has lost some.
        self._field_of_mirror, self._number = "", 0
        self.life = LifeCycle(policy, self)
        self._reset()

    # Joining.

    def _reset(self) -> None:
        self.id = ""
        self.live: Sequence[RedisGeneration] = ()
        # A thread may replace the whole tuple while the event loop uses it.
        locate = make_hasher(bytes(16), 1)
        self._bits = _Bits(locate, Recent(_MOST_RECENT), locate)

    def join(self) -> None:
        """Join the filter, or create it."""
        self._reset()
        self._server_ahead = self.server.now() - time.monotonic()
        end = time.monotonic() + _START_PATIENCE_SECS
        while (stored := read_stored(self.server, self.key)) is None:
            if not self._create():
                if time.monotonic() > end:
                    raise StorageError(
                        f"another crawl has been creating {self.name} for an hour; check that "
                        "crawl, and try again"
                    )
                time.sleep(_POLL_SECS)
        theirs, ours = stored.origin.fingerprinter, self._origin.fingerprinter
        if theirs != ours:
            raise FingerprinterMismatchError.of(self.name, theirs, ours, "another BLOOM_REDIS_KEY")
        self._adopt(stored)

    def begin_run(self) -> None:
        """Keep the generations that this crawl records in until it ends."""
        self.run_from = self.live[-1].number
        self.kept_from = min(self.kept_from, self.run_from)

    def refresh(self) -> None:
        """Read the current generations; raises OtherFilterError."""
        stored = read_stored(self.server, self.key)
        if stored is None or stored.id != self.id:
            raise self._lost()
        self._adopt(stored)

    def _adopt(self, stored: Stored) -> None:
        # This comes first: if it fails, the next batch is refused, and it is done again.
        finish(self.server, self.key, stored.unfinished)
        is_same = stored.id == self.id
        if not is_same:
            self._begin_mirrors()
        known = {each.id: each for each in self.live} if is_same else {}
        live = []
        for each in stored.generations:
            same = known.pop(each.id, each)
            same.count, same.open_until = each.count, each.open_until
            live.append(same)
        self.id, self.version, self.salt = stored.id, stored.version, stored.salt
        if not is_same and self.run_from < math.inf:  # the server had lost the filter
            self.run_from = live[-1].number
        self.kept_from = min(stored.kept_from, self.run_from)
        if not self.sample:
            self.sample = self._stored_sample = stored.sample
        self._use(live)
        self.life.plan()

    def _use(self, live: Sequence[RedisGeneration]) -> None:
        """Use these generations from now on, and mirror them."""
        if self._mirror:
            _add_mirrors(live, self.salt)
        most = max(each.geometry.num_hashes for each in live)
        self._bits = _Bits(
            _remembering(make_hasher(self.salt, most)),
            Recent(_MOST_RECENT),
            make_hasher(self.salt, MAX_HASHES),
            [each.mirror for each in reversed(live) if each.mirror],
            struct.Struct(f">HI{most}H").pack,
        )
        self.live = live

    def _create(self) -> bool:
        """Create the filter; return False if another crawl has created it, or is doing so."""
        with closing(Maker(self.server, self.key)) as maker:
            if not maker.begin("", ""):
                return False
            salt, now = checked_salt(self._origin.salt), self.now()
            end = self._policy.open_until(now)
            new = RedisGeneration.of(self._policy.first(), 1, now, open_until=end)
            try:
                maker.make(new)
                text = described(replace(self._origin, salt=salt))
                fields = {"filter": text, "version": secrets.token_hex(8)}
                return maker.create(secrets.token_hex(8), fields) == "ok"
            except NoRoomError as error:
                raise StorageError(
                    f"{self.server.address}: {_no_room_for(new, error)}. Give it more memory, or "
                    "lower BLOOM_EXPECTED_REQUESTS"
                ) from error

    # Scripts.

    def run(self, script: str, *args: Any) -> Any:
        """Run a script on the keys, whose first argument is the id, and return its reply.

        Raises an OtherFilterError if the filter was replaced.
        """
        answer = self.server.script(script, self.keys, *args)
        if answer[0] == b"other":
            raise self._lost()
        return answer

    def _lost(self) -> OtherFilterError:
        return OtherFilterError(f"{self.name} was removed, or lost")

    @property
    def arguments(self) -> dict[str, Any]:
        """Return the arguments of a batch that describe the filter."""
        return {
            "id": self.id,
            "version": self.version,
            "count_field": f"count:{self.live[-1].number}",
            "generations": [
                {
                    "prefix": blocks_prefix(self.key, each.id),
                    "num_blocks": each.geometry.num_blocks,
                    "num_hashes": each.geometry.num_hashes,
                }
                for each in self.live
            ],
        }

    @property
    def lasting(self) -> int:
        """Return the place, from 1 on, of the first generation that lasts as long as the run."""
        numbers = [each.number for each in self.live]
        is_kept = self.life.has_window and numbers[-1] >= self.kept_from
        return 1 + sum(number < self.kept_from for number in numbers) if is_kept else 1

    def bits_of(self, fingerprint: bytes) -> bytes:
        """Return the bits of a fingerprint as scripts take them; they are valid for this batch."""
        block_hash, positions = self._bits.locate(fingerprint)
        return self._bits.pack(block_hash >> 32, block_hash & _LOW, *positions)

    def lasting_bits_of(self, fingerprint: bytes) -> bytes:
        """Return the bits of a fingerprint, which are valid for all generations to come."""
        block_hash, positions = self._bits.locate_all(fingerprint)
        return _ALL_BITS.pack(block_hash >> 32, block_hash & _LOW, *positions)

    def knows(self, fingerprint: bytes) -> bool:
        """Return whether a mirror has a fingerprint; the server is not asked."""
        is_known = self._is_in_mirrors(fingerprint)
        self.mirror_hits += is_known
        return is_known

    def _is_in_mirrors(self, fingerprint: bytes) -> bool:
        bits = self._bits
        if fingerprint in bits.recent:
            return True
        block_hash, positions = bits.locate(fingerprint)
        for each in bits.mirrors:  # usually one mirror, for which any() would double the time
            if each.has_hashed(block_hash, positions):
                bits.recent.add(fingerprint)
                return True
        return False

    def add_to_mirror(self, fingerprint: bytes, answer: str) -> None:
        """Add a fingerprint to the mirror of the generation that has it.

        Args:
            fingerprint: of a batch.
            answer: the answer of the batch.
        """
        generation = self.live[-1 if answer == NEW else ord(answer) - 1]
        if generation.mirror is not None:
            block_hash, positions = self._bits.locate(fingerprint)
            generation.mirror.add_hashed(block_hash, positions[: generation.geometry.num_hashes])
            self._bits.recent.add(fingerprint)

    def exchange(self, fingerprints: Sequence[bytes], *, records: bool) -> str:
        """Look fingerprints up, and record them if `records`; return an answer for each.

        Raises:
            OtherFilterError: or one of its children: the filter, keys, or changes were lost.
        """
        while True:
            # A batch that does not feed a mirror has no number of its own: losing it does no harm.
            # But the first batch has one, so that a read-only server refuses it at the start.
            is_numbered = bool(self._mirror and (fingerprints or not self._number))
            number = self._number + is_numbered
            mirror_value = f"{number} {int(self.now())}" if is_numbered else ""
            arguments = {
                **self.arguments,
                "mirror": self._field_of_mirror,
                "number": number,
                "mirror_value": mirror_value,
                "records": records,
                "fingerprints": [self.bits_of(each) for each in fingerprints],
            }
            words = words_of(RECORD_FIELDS, arguments)
            # Only keys that must exist are declared: while a slot moves to another node, a Cluster
            # refuses a script with a missing key, and the script is tried again.
            declared = dict.fromkeys([self.key, *self._block_keys(fingerprints)])
            answer = self.server.script(RECORD, list(declared), *words)
            if answer[0] == b"ok":
                break
            if answer[0] == b"lost":
                raise LostKeysError(f"{self.server.address} has lost keys of {self.name}")
            if answer[0] == b"back":
                raise WentBackError(f"{self.server.address} has lost changes of {self.name}")
            self.refresh()  # raises an OtherFilterError if the filter was replaced
        self._number = number
        answers = str(answer[1].decode())
        for each, letter in zip(fingerprints, answers, strict=True):
            if records or letter != NEW:
                self.add_to_mirror(each, letter)
        self.update_count(answer[2])
        return answers

    def _block_keys(self, fingerprints: Sequence[bytes]) -> Iterator[str]:
        for fingerprint in fingerprints:
            block_hash, _ = self._bits.locate(fingerprint)
            for each in self.live:
                chunk = block_of(block_hash, each.geometry.num_blocks) // CHUNK_BLOCKS
                yield block_key(self.key, each.id, chunk)

    def update_count(self, count: bytes | int | None) -> None:
        """Keep the count of the newest generation that a batch has returned."""
        self.live[-1].count = int(count or 0)

    def clear(self) -> None:
        """Remove the filter, or what is left of it, for all crawlers; `join` must follow."""
        remove_filter(self.server, self.key, self.id)
        self._reset()

    def drop_mirrors(self) -> None:
        """Start with empty mirrors, because the server may have lost bits."""
        for each in self.live:
            each.mirror = None
        self._begin_mirrors()
        self._use(self.live)

    def _begin_mirrors(self) -> None:
        """Number batches from 1, under a new random field of the hash."""
        self._field_of_mirror = f"mirror:{secrets.token_hex(4)}" if self._mirror else ""
        self._number = 0

    def leave(self) -> None:
        """Remove the field of the mirrors from the hash."""
        if self._number:
            self.server.send("HDEL", self.key, self._field_of_mirror, patient=False)

    def store_sample(self) -> None:
        """Store the sample if this crawl has changed it."""
        if (sample := self.sample) != self._stored_sample:
            self._stored_sample = sample
            self._change({"sample": sample})

    def keep_up(self) -> None:
        """Add a generation or end a quarter of the window, if that is due; store a new sample."""
        self.store_sample()
        if self.life.has_window and self.now() >= self.life.due_at:
            self.life.turn()
        if self.life.is_full():
            self.life.grow()

    # The methods of `Generations`.

    def now(self) -> float:
        """Return the server's time, but never before the creation of the newest generation."""
        return max(self._clock(), self.live[-1].created_at if self.live else 0.0)

    def _clock(self) -> float:
        return time.monotonic() + self._server_ahead

    def ends(self, newest: Generation) -> float:
        """Return when the newest generation ends, by the current window if that is earlier."""
        own = self._policy.open_until(newest.created_at)
        if newest.open_until and newest.number >= self.kept_from:
            return newest.open_until
        return min(newest.open_until or own, own)

    def append(self, size: Size, created_at: float, open_until: float) -> bool:
        """Add a generation; return False if another crawl is adding one. Raises NoRoomError."""
        ended = self.live[-1]
        new = RedisGeneration.of(
            size,
            ended.number + 1,
            created_at,
            open_until=open_until or self._policy.open_until(created_at),
        )
        with closing(Maker(self.server, self.key)) as maker:
            if maker.begin(self.id, self.version):
                try:
                    maker.make(new)
                    maker.check()
                except NoRoomError as error:
                    raise NoRoomError(_no_room_for(new, error)) from error
                self._change(new.new_fields)
            else:
                self.refresh()
        return self.live[-1].number > ended.number

    def extend(self, open_until: float) -> None:
        """Keep the newest generation open for longer, for all crawlers."""
        newest = self.live[-1]
        newest.open_until = open_until
        name = f"gen:{newest.number}"
        self._change({name: newest.fields[name]})

    def expire(self, number: int) -> None:
        """Remove the oldest generations.

        Args:
            number: how many.
        """
        gone = self.live[:number]
        self._change(
            {f"unlink:{each.id}": str(each.num_chunks) for each in gone},
            [f"{kind}:{each.number}" for each in gone for kind in ("gen", "count")],
        )

    def _change(self, added: Mapping[str, str], removed: Sequence[str] = ()) -> None:
        """Change fields of the hash, unless another crawl has changed the generations."""
        words = [word for field in added.items() for word in field]
        next_version = secrets.token_hex(8)
        counted = (len(removed), *removed, len(added), *words)
        self.run(scripts.CHANGE, self.id, self.version, next_version, *counted)
        self.refresh()


def empty_filter(server: RedisServer, key: str) -> None:
    """Replace the generations of a filter by one of the size of the first, which is empty.

    Crawls go on with it. Raises a StorageError if there is no room, or a crawl adds one meanwhile.
    """
    stored = read_existing(server, key)
    first, rate = stored.generations[0], stored.origin.error_rate
    size = Size(capacity=first.capacity, error_rate=first.error_rate)
    window = window_of(stored.generations)
    policy = Policy(expected=first.capacity, error_rate=rate, window=window)
    shared = SharedFilter(server, key, policy, stored.origin, mirror=False)
    shared.join()
    try:
        is_added = shared.append(size, shared.now(), 0.0)
    except NoRoomError as error:
        raise StorageError(f"{server.address}: {error}; nothing was changed") from error
    if not is_added:
        raise StorageError(f"{shared.name} is in use; nothing was changed. Try again in a minute")
    shared.expire(len(shared.live) - 1)


def _no_room_for(new: RedisGeneration, error: NoRoomError) -> str:
    return f"{error}, and a generation takes {new.geometry.nbytes:,} bytes"


def _remembering(locate: Callable[[bytes], Hashed]) -> Callable[[bytes], Hashed]:
    """Return a hash function that caches its last result.

    A new fingerprint is hashed three times in a row. `functools.lru_cache` takes twice the time.
    """
    last: tuple[bytes, Hashed] = (b"", locate(b""))  # any thread may replace the whole tuple

    def located(fingerprint: bytes) -> Hashed:
        nonlocal last
        known, hashed = last
        if known is not fingerprint:
            hashed = locate(fingerprint)
            last = fingerprint, hashed
        return hashed

    return located


def _add_mirrors(live: Sequence[RedisGeneration], salt: bytes) -> None:
    """Give live generations mirrors, the newest first, within MAX_MIRROR_BYTES."""
    used = sum(each.geometry.nbytes for each in live if each.mirror is not None)
    for each in reversed(live):
        nbytes = each.geometry.nbytes
        if each.mirror is None and used + nbytes <= MAX_MIRROR_BYTES:
            used += nbytes
            each.mirror = BloomFilter.from_buffer(
                memoryview(mmap.mmap(-1, nbytes)),
                each.geometry,
                capacity=each.capacity,
                error_rate=each.error_rate,
                salt=salt,
            )
