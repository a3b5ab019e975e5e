"""Asking and recording in the generations of a shared filter, which other crawlers change."""

from collections.abc import Sequence

from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.filters.hashing import Hashed, block_of
from scrapy_bloom.generations.lifecycle import LifeCycle
from scrapy_bloom.redis.generations import SharedGenerations
from scrapy_bloom.redis.keys.blocks import ALIVE, SEALED
from scrapy_bloom.redis.keys.meta import RedisGeneration
from scrapy_bloom.redis.keys.store import RedisStore

MOST_CHANGES = 100  # of the generations, while one fingerprint is recorded


class Recorder:
    """Asks the older generations, and records in the newest one."""

    def __init__(self, shared: SharedGenerations, life: LifeCycle) -> None:
        self._store = shared.store
        self._known = shared.known
        self._shared = shared
        self._life = life

    def record(self, fingerprint: bytes, hashed: Hashed, done: set[str] | None = None) -> bool:
        """Set the bits where they belong; False if they were set before.

        Args:
            fingerprint: what to record.
            hashed: the same, hashed.
            done: sealed generations that did not have it: bits that were set there since tell
                nothing, be they our own or of another crawler that came too late.
        """
        done = set() if done is None else done
        for _ in range(MOST_CHANGES):
            live, newest = self._known.live, self._known.newest
            if self._life.is_full():
                if self.has(fingerprint, hashed, done):
                    return False
                if self._known.newest is newest:  # else another crawler has just made the next
                    self._life.grow()
            elif self._known.older and self.is_in_older(hashed, done):
                return False
            if self._known.live is live:
                new = self._settled(newest, hashed, self._store.blocks.record(newest, hashed))
                if new is not None:
                    return new
                done.add(newest.id)
            # Other generations, and perhaps another salt.
            hashed = self._known.locate(fingerprint)
        raise always_changing(self._store)

    def record_batch(self, pending: Sequence[tuple[bytes, Hashed]]) -> int:
        """Record fingerprints that no older generation has, with one round trip; count the new.

        Args:
            pending: each as it is, and hashed.

        Returns:
            How many were new.
        """
        newest, added = self._known.newest, 0
        answers = self._store.blocks.record_many(newest, [hashed for _, hashed in pending])
        for (fingerprint, hashed), answer in zip(pending, answers, strict=True):
            is_new = self._settled(newest, hashed, answer)
            if is_new is None:
                again = self._known.locate(fingerprint)  # perhaps with another salt
                is_new = self.record(fingerprint, again, {newest.id})
            if is_new:
                added += 1
                self._shared.count()
        return added

    def _settled(
        self, newest: RedisGeneration, hashed: Hashed, answer: tuple[bool, int]
    ) -> bool | None:
        """Act upon the server's answer; return whether it was new, None if it belongs elsewhere."""
        new, marks = answer
        if marks == SEALED:
            # In what is sealed, others do not look for it any more.
            if self._known.newest is newest:
                if new:
                    self._shared.follow(newest)
                else:
                    self._shared.refresh()
            return None if new else False
        if marks != ALIVE:
            self._shared.lost(newest, hashed)
            if self._known.newest is not newest:
                return None
        if newest.mirror is not None:
            block_hash, positions = hashed
            newest.mirror.add_hashed(block_hash, positions[: newest.geometry.num_hashes])
        return new

    def has(self, fingerprint: bytes, hashed: Hashed, done: set[str] | None = None) -> bool:
        """Check whether any generation has a fingerprint; see `record`."""
        done = set() if done is None else done
        for _ in range(MOST_CHANGES):
            live, newest = self._known.live, self._known.newest
            if self.is_in_older(hashed, done):
                return True
            if self._known.live is live:
                seen, marks = self._store.blocks.look(newest, hashed)
                if marks == SEALED and not seen:
                    self._shared.refresh()
                elif marks not in {ALIVE, SEALED}:
                    self._shared.lost(newest, hashed)
                if self._known.newest is newest:
                    return seen
            hashed = self._known.locate(fingerprint)
        raise always_changing(self._store)

    def is_in_older(self, hashed: Hashed, done: set[str]) -> bool:
        """Check whether one before the newest has it; False too if they turn out to change."""
        live = self._known.live
        for each in self._known.older:
            if each.id in done:
                continue
            marks = ALIVE
            if each.mirror is None:
                seen, marks = self._store.blocks.look(each, hashed)
            else:
                block = block_of(hashed[0], each.geometry.num_blocks)
                if not each.complete[block]:
                    # It is sealed, so what is there now is all there will ever be.
                    data, marks = self._store.blocks.fetch(each, block)
                    each.mirror.add_blocks(block, data)
                    each.complete[block] = 1
                seen = each.mirror.has_hashed(*hashed)
            if marks not in {ALIVE, SEALED}:
                self._shared.lost(each, hashed)
                if self._known.live is not live:
                    return False
            if seen:
                return True
            # It was sealed before we asked: what others set there since tells nothing, either.
            done.add(each.id)
        return False


def always_changing(store: RedisStore) -> StorageError:
    """Return the error of somebody who gave up."""
    return StorageError(
        f"{store.server.address}: the generations of {store.key!r} change all the time"
    )
