"""A filter in Redis or Valkey, as one crawl takes part in it: its generations and their mirrors.

Each change of the generations gives the filter another version, and each script names the version
that it is for. So no bit is ever set in a generation that has ended.
"""

import logging
import math
import secrets
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from scrapy_bloom.exceptions import FingerprinterMismatchError, RefusedError, StorageError
from scrapy_bloom.filters.bloom import BloomFilter
from scrapy_bloom.filters.hashing import Hashed, block_of, make_hasher
from scrapy_bloom.filters.sizing import BLOCK_BITS
from scrapy_bloom.generations.lifecycle import NoRoomError
from scrapy_bloom.generations.memory import Recent
from scrapy_bloom.generations.policy import Generation, Origin, Policy, Size
from scrapy_bloom.job.requests_seen import SeenFile, import_seen
from scrapy_bloom.redis import scripts
from scrapy_bloom.redis.batch_script import RECORD
from scrapy_bloom.redis.connection.server import RedisServer
from scrapy_bloom.redis.making import Maker, finish, remove_blocks
from scrapy_bloom.redis.scripts import CHUNK_BLOCKS, block_key, keys_of
from scrapy_bloom.redis.stored import FilterInfo, RedisGeneration, Stored, add_mirrors, parsed

logger = logging.getLogger(__name__)

NEW = ("n", "f")  # answers to what was not recorded, or was forgotten
_MOST_RECENT = 65_536  # 6 MB of fingerprints
_POLL_SECS = 0.1
_START_PATIENCE_SECS = 3600.0  # while another makes the first generation


class OtherFilterError(StorageError):
    """The filter is gone, or another one is in its place: what was known of it is void."""


class LostKeysError(OtherFilterError):
    """The server has lost a part of the filter, or of its queue, so all of it is void."""


class WentBackError(OtherFilterError):
    """The server has lost the latest changes, so what the mirrors know of them is void."""


class _Lookup(NamedTuple):
    locate: Callable[[bytes], Hashed]
    recent: Recent
    mirrors: Sequence[BloomFilter]  # the newest first


class _Layout(NamedTuple):
    """Where the bits of a fingerprint are, in the words of a script."""

    fields: Sequence[Any]  # of the newest generation's count, and the hashes of all, oldest first
    pack: Callable[..., bytes]  # of the positions in a block
    keys: Sequence[tuple[int, Sequence[tuple[str, int]]]]  # of each: blocks, keys and their lengths


class SharedFilter:
    """A filter's hash and blocks, and the mirrors of its bits: a store of `Generations`.

    Args:
        server: the connection.
        key: the name of the hash.
        policy: how large the filter is, and when it grows and expires.
        origin: what the filter holds, and whose.
        mirror: whether to keep one: as much memory as the filter takes, up to 1 GiB.
        changed: called when the list of generations has changed.
        clock: seconds since 1970, for tests; None: the server's.
        shards: how many filters there are of this kind, of which this is one.

    Attributes:
        id: of the filter; another one if it was lost, or removed.
        live: generations, oldest first.
        kept_from: number of the first generation that must not end, because the crawl of a shared
            queue has recorded in it; infinite once that crawl has ended.
        forgets: how often fingerprints were forgotten, as far as is known.
    """

    def __init__(
        self,
        server: RedisServer,
        key: str,
        policy: Policy,
        origin: Origin,
        *,
        mirror: bool = True,
        changed: Callable[[], None] = lambda: None,
        clock: Callable[[], float] | None = None,
        shards: int = 1,
    ) -> None:
        self.server = server
        self.key = key
        self.keys = keys_of(key)
        self.name = f"the filter {key!r} in {server.address}"
        self.version = ""
        self.info = FilterInfo.of(origin, 0.0, shards)
        self.kept_from = math.inf
        self.forgets = 0
        self._policy = policy
        self._origin = origin
        self._mirror = mirror
        self._changed = changed
        self._clock = clock
        self._shards = shards
        self._server_ahead = 0.0  # its clock, of our monotonic one
        # Replies feed the mirrors, so batches are numbered: a server that has lost some says so.
        self._field_of_mirror, self._number = "", 0
        self._know_nothing()

    # Joining.

    def _know_nothing(self) -> None:
        self.id = ""
        self.live: Sequence[RedisGeneration] = ()
        # For the mirrors. A thread may replace it, as a whole, while the event loop asks.
        self._lookup = _Lookup(make_hasher(bytes(16), 1), Recent(_MOST_RECENT), ())

    def join(
        self, importable: Path | None = None, *, new_id: str = "", creates: bool = True
    ) -> bool:
        """Take part in the filter, or create it; return whether it is new.

        A new one gets the id `new_id`, or a random one, and begins with the requests.seen that is
        `importable`. Without `creates`, an OtherFilterError is raised in its place.
        """
        self._know_nothing()
        self._server_ahead = self.server.now() - time.monotonic()
        is_new, end = False, time.monotonic() + _START_PATIENCE_SECS
        while (stored := self.read()) is None:
            if not creates:
                raise OtherFilterError(f"{self.name} was removed, or lost")
            is_new = self._create(importable, new_id or secrets.token_hex(8))
            if not is_new:
                if time.monotonic() > end:
                    raise StorageError(f"another crawl is making {self.name}, and does not end")
                time.sleep(_POLL_SECS)
        there, here = stored.info.fingerprinter, self._origin.fingerprinter
        if there != here:
            raise FingerprinterMismatchError.of(self.name, there, here, "another BLOOM_REDIS_KEY")
        if not new_id:
            stored.info.check_shards(self.name, self._shards)
        self._adopt(stored)
        return is_new

    def read(self) -> Stored | None:
        """Return what is stored, None if nothing is; raises RefusedError if it is no filter."""
        what = f"the key {self.key!r} of {self.server.address}"
        raw = self.server.send("HGETALL", self.key)
        if not raw:
            return None
        try:
            return parsed(raw)
        except StorageError as error:
            raise RefusedError(f"{what}: {error}") from None
        except ValueError as error:
            raise RefusedError(
                f"{what} is no filter of scrapy_bloom, or a damaged one ({error}); it was left as "
                "it is: set BLOOM_REDIS_KEY to another name"
            ) from None

    def refresh(self) -> None:
        """Read which generations there are now; raises OtherFilterError."""
        stored = self.read()
        if stored is None or stored.id != self.id:
            raise OtherFilterError(f"{self.name} was removed, or lost")
        self._adopt(stored)

    def _adopt(self, stored: Stored) -> None:
        # First: should it fail, the next batch is refused, and this is done again.
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
        self.id, self.version, self.info = stored.id, stored.version, stored.info
        self.kept_from = stored.kept_from
        self._use(live)
        self._changed()

    def _use(self, live: Sequence[RedisGeneration]) -> None:
        """Ask these generations from now on, and mirror them."""
        salt = bytes.fromhex(self.info.salt)
        if self._mirror:
            add_mirrors(live, salt, self._shards)
        most = max(each.geometry.num_hashes for each in live)
        mirrors = [each.mirror for each in reversed(live) if each.mirror]
        locate = _remembering(make_hasher(salt, most))
        self._lookup = _Lookup(locate, Recent(_MOST_RECENT), mirrors)
        self._layout = _Layout(
            [f"count:{live[-1].number}", len(live), *(each.geometry.num_hashes for each in live)],
            struct.Struct(f">{most}H").pack,
            [
                (
                    each.geometry.num_blocks,
                    [
                        (self.chunk_key(each, chunk), each.chunk_bytes(chunk))
                        for chunk in range(each.num_chunks)
                    ],
                )
                for each in live
            ],
        )
        self.live = live

    def _create(self, importable: Path | None, ours: str) -> bool:
        """Create the filter; return False if another crawl has done so, or is about to."""
        with closing(Maker(self.server, self.key)) as maker:
            if not maker.begin("", ""):
                return False
            size, content, count = self._policy.first(), None, 0
            info = FilterInfo.of(self._origin, self.now(), self._shards)
            if importable is not None:
                seen = SeenFile(importable)
                size = self._policy.first(at_least=seen.count())
                content = size.filter(bytes.fromhex(info.salt))
                count = import_seen(seen, content.add)
            now = self.now()
            end = self._policy.open_until(now)
            new = RedisGeneration.of(size, 1, now, open_until=end, count=count)
            try:
                maker.make(new, content)
                fields = {"filter": info.text, "version": secrets.token_hex(8)}
                return maker.create(ours, fields) == "ok"
            except NoRoomError as error:
                raise StorageError(
                    f"{self.server.address}: {_no_room_for(new, error)}; give it more, or lower "
                    "BLOOM_EXPECTED_REQUESTS"
                ) from error

    # Scripts.

    def _script(self, text: str, *args: Any) -> Any:
        return self.server.script(text, self.keys, *args)

    @property
    def layout(self) -> Sequence[Any]:
        """Return the words of a batch that describe the generations."""
        return self._layout.fields

    def bits_of(self, fingerprint: bytes) -> list[Any]:
        """Return the words of a batch that describe a fingerprint, and where its bits are."""
        block_hash, positions = self._lookup.locate(fingerprint)
        words: list[Any] = [fingerprint, self._layout.pack(*positions)]
        for num_blocks, keys in self._layout.keys:
            chunk, block = divmod(block_of(block_hash, num_blocks), CHUNK_BLOCKS)
            words += keys[chunk]
            words.append(block * BLOCK_BITS)
        return words

    def knows(self, fingerprint: bytes) -> bool:
        """Return whether a mirror has a fingerprint; nothing is asked."""
        locate, recent, mirrors = self._lookup
        if fingerprint in recent:
            return True
        block_hash, positions = locate(fingerprint)
        for each in mirrors:  # mostly one: any() would take as long again
            if each.has_hashed(block_hash, positions):
                recent.add(fingerprint)
                return True
        return False

    def add_to_mirror(self, fingerprint: bytes, answer: str) -> None:
        """Note in the mirrors what a batch answered: who has it, or has it now.

        What was forgotten may be in any generation, and is asked for again.
        """
        if answer == "f":
            return
        generation = self.live[-1 if answer in NEW else ord(answer) - 1]
        if generation.mirror is not None:
            block_hash, positions = self._lookup.locate(fingerprint)
            generation.mirror.add_hashed(block_hash, positions[: generation.geometry.num_hashes])
            self._lookup.recent.add(fingerprint)

    def exchange(self, fingerprints: Sequence[bytes], kind: str) -> str:
        """Record fingerprints ("n"), or ask for them ("?"); return an answer for each.

        Raises an OtherFilterError, also if keys or the latest changes were lost.
        """
        while True:
            # What feeds no mirror has no number of its own: nothing is lost if it is forgotten. But
            # the first batch has one, so a server that takes no writes refuses it at the start.
            is_numbered = bool(self._mirror and (fingerprints or not self._number))
            number = self._number + is_numbered
            noted = f"{number} {int(self.now())}" if is_numbered else ""
            count_field, *hashes = self._layout.fields
            words = [self.keys[-1], self.id, self.version, count_field, self._field_of_mirror]
            words += [number, noted, kind, *hashes]
            # Declared are the keys that must exist, and no others: while a slot moves to another
            # node, a script is refused, and tried again, if one of its keys is not there.
            declared = dict.fromkeys(self.keys[:1])
            for each in fingerprints:
                bits = self.bits_of(each)
                declared |= dict.fromkeys(bits[2::3])  # the keys of its blocks
                words += bits
            answer = self.server.script(RECORD, list(declared), *words)
            if answer[0] == b"ok":
                break
            if answer[0] == b"lost":
                raise LostKeysError(f"{self.server.address} has lost keys of {self.name}")
            if answer[0] == b"back":
                raise WentBackError(f"{self.server.address} has lost changes of {self.name}")
            self.refresh()  # which raises the error if it is another filter
        self._number = number
        answers = str(answer[1].decode())
        for each, letter in zip(fingerprints, answers, strict=True):
            if kind != "?" or letter not in NEW:
                self.add_to_mirror(each, letter)
        self.update_counts(*answer[2:])
        return answers

    def update_counts(self, forgets: bytes | int | None, count: bytes | int | None) -> None:
        """Keep the figures of the filter that a batch has returned."""
        self.forgets = int(forgets or 0)
        self.live[-1].count = int(count or 0)

    def remove(self) -> None:
        """Remove the filter and its queue, for all crawlers, unless it is another one by now."""
        stored = self.read()  # others may have changed the generations
        if stored is None:
            return
        finish(self.server, self.key, stored.unfinished)
        if self._script(scripts.REMOVE, self.id)[0] == b"ok":
            for each in stored.generations:
                remove_blocks(self.server, self.key, each.id, each.num_chunks)

    def clear(self) -> None:
        """Remove the filter, or what is left of it. It has to be joined again."""
        self.remove()
        self._know_nothing()

    def drop_mirrors(self) -> None:
        """Start with empty mirrors, because the server may have lost bits."""
        for each in self.live:
            each.mirror = None
        self._begin_mirrors()
        self._use(self.live)

    def _begin_mirrors(self) -> None:
        """Number batches from 1 on, under a name that the server has not met."""
        self._field_of_mirror = f"mirror:{secrets.token_hex(4)}" if self._mirror else ""
        self._number = 0

    def leave(self) -> None:
        """Have the server forget the mirrors' name."""
        if self._number:
            self.server.send("HDEL", self.key, self._field_of_mirror, patient=False)

    # The methods of `Generations`.

    def now(self) -> float:
        """Return the time for all crawlers; never before the newest generation's."""
        now = self._clock() if self._clock else time.monotonic() + self._server_ahead
        return max(now, self.live[-1].created_at if self.live else 0.0)

    def ends(self, newest: Generation) -> float:
        """Return when the newest generation ends; the window may have changed since it was made."""
        own = self._policy.open_until(newest.created_at)
        if newest.open_until and newest.number >= self.kept_from:
            return newest.open_until
        return min(newest.open_until or own, own)

    def append(self, size: Size, created_at: float, open_until: float) -> bool:
        """Add a generation; False if another crawler is about to. Raises NoRoomError."""
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
                self.change(set_=new.new_fields)
            else:
                self.refresh()
        return self.live[-1].number > ended.number

    def extend(self, open_until: float) -> None:
        """Keep the newest generation open for longer, for all crawlers."""
        newest = self.live[-1]
        newest.open_until = open_until
        name = f"gen:{newest.number}"
        self.change(set_={name: newest.fields[name]})

    def expire(self, number: int) -> None:
        """Remove so many of the oldest generations."""
        gone = self.live[:number]
        self.change(
            [f"{kind}:{each.number}" for each in gone for kind in ("gen", "count")],
            {f"unlink:{each.id}": str(each.num_chunks) for each in gone},
        )

    def change(self, remove: Iterable[str] = (), set_: dict[str, str] | None = None) -> None:
        """Change fields of the hash, unless others have changed the generations meanwhile."""
        removed, added = list(remove), dict(set_ or {})
        answer = self._script(
            scripts.CHANGE,
            *(self.id, self.version, secrets.token_hex(8), len(removed), *removed, len(added)),
            *(word for field in added.items() for word in field),
        )
        if answer[0] == b"other":
            raise OtherFilterError(f"{self.name} was removed, or lost")
        self.refresh()

    # Blocks.

    def chunk_key(self, generation: RedisGeneration, chunk: int) -> str:
        """Return the name of one of the keys of a generation's blocks."""
        return block_key(self.key, generation.id, chunk)


def _no_room_for(new: RedisGeneration, error: NoRoomError) -> str:
    return f"{error}, and a generation takes {new.geometry.nbytes:,} bytes"


def _remembering(locate: Callable[[bytes], Hashed]) -> Callable[[bytes], Hashed]:
    """Return a hash function that remembers its last result: a new fingerprint is hashed thrice."""
    last: tuple[bytes, Hashed] = (b"", locate(b""))  # replaced as a whole, by any thread

    def located(fingerprint: bytes) -> Hashed:
        nonlocal last
        known, hashed = last
        if known is not fingerprint:
            hashed = locate(fingerprint)
            last = fingerprint, hashed
        return hashed

    return located
