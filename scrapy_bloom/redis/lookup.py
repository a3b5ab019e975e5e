"""Recording and asking in a shared filter: its mirrors first, then the server."""

import math
import time
from collections.abc import Callable, Sequence

from scrapy_bloom.exceptions import OutageError
from scrapy_bloom.filters.hashing import Hashed
from scrapy_bloom.generations.backoff import next_attempt
from scrapy_bloom.generations.lifecycle import LifeCycle
from scrapy_bloom.redis.connection.server import ReplacedError
from scrapy_bloom.redis.generations import SharedGenerations
from scrapy_bloom.redis.keys.blocks import ALIVE, SEALED
from scrapy_bloom.redis.recording import MOST_CHANGES, Recorder, always_changing

_BATCH = 256  # fingerprints recorded at once
_MOST_UNCONFIRMED = 1000  # answers of the mirrors, where these may turn out to be wrong


class SharedLookup:
    """Asking and recording over all live generations of a shared filter.

    Args:
        shared: the generations.
        life: makes the next one.
        trust_secs: how long the mirrors are trusted without a word from the server.

    Attributes:
        mirror_hits: how often a mirror knew the answer.
        unconfirmed: how often it did since the server's last word.
    """

    def __init__(self, shared: SharedGenerations, life: LifeCycle, trust_secs: float) -> None:
        self.mirror_hits = self.unconfirmed = 0
        self._most_unconfirmed = _MOST_UNCONFIRMED if shared.queue_is_shared else math.inf
        self._recorder = Recorder(shared, life)
        self._store = shared.store
        self._server = shared.store.server
        self._known = shared.known
        self._shared = shared
        self._life = life
        self._trust_secs = trust_secs
        self._confirm_at = 0.0  # on a monotonic clock

    def add(self, fingerprint: bytes) -> bool:
        """See `RedisBackend.add`."""
        return self._unless_replaced(self._add, fingerprint, self._server.retries)

    def _unless_replaced(self, operation: Callable[..., bool], *args: object) -> bool:
        """Do something; if another server answers than before, forget all and do it again."""
        if not self._shared.queue_is_shared:
            return operation(*args)
        server = self._server
        replaced = server.was_replaced()
        server.is_watched = True
        try:
            for _ in range(MOST_CHANGES):
                try:
                    if replaced:
                        self._shared.begin_anew()
                    return operation(*args)
                except ReplacedError:
                    replaced = True
                    server.retries += 1  # it may have been done
        finally:
            server.is_watched = False
        raise always_changing(self._store)

    def _add(self, fingerprint: bytes, retries: int) -> bool:
        hashed = self._unless_known(fingerprint)
        if hashed is None:
            return False
        new = self._recorder.record(fingerprint, hashed)
        self._is_confirmed()
        if not new and self._server.retries == retries:
            return False
        self._shared.count()
        return True

    def record_anew(self, fingerprint: bytes) -> None:
        """Record a fingerprint that an older generation has in the newest one, too."""
        if self._store.blocks.record(self._known.newest, self._known.locate(fingerprint))[0]:
            self._shared.count()

    def add_many(self, fingerprints: Sequence[bytes]) -> int:
        """See `RedisBackend.add_many`."""
        added = position = 0
        while position < len(fingerprints):
            if not self._known.live:
                self._shared.join()
            newest = self._known.newest
            # So few that it is hardly fuller than it may be.
            number = min(_BATCH, newest.capacity // 100)
            if number < 2 or self._life.is_full():
                added += self.add(fingerprints[position])
                position += 1
            else:
                added += self._add_batch(fingerprints[position : position + number])
                position += number
        return added

    def _add_batch(self, fingerprints: Sequence[bytes]) -> int:
        newest = self._known.newest
        pending = []
        for fingerprint in fingerprints:
            hashed = self._unless_known(fingerprint)
            if hashed is not None and not self._recorder.is_in_older(hashed, set()):
                pending.append((fingerprint, hashed))
        if self._known.newest is not newest or not pending:
            return sum(self.add(fingerprint) for fingerprint, _ in pending)
        return self._recorder.record_batch(pending)

    def __contains__(self, fingerprint: bytes) -> bool:
        return self._unless_replaced(self._has, fingerprint)

    def _has(self, fingerprint: bytes) -> bool:
        hashed = self._unless_known(fingerprint)
        if hashed is None:
            return True
        found = self._recorder.has(fingerprint, hashed)
        self._is_confirmed()
        return found

    def confirm(self) -> None:
        """Ask the server whether the filter is still the one that the mirrors are of."""
        self._unless_replaced(self._confirmed)

    def _confirmed(self) -> bool:
        if self._known.live:
            self._confirm(self._known.locate(b""), patient=True)
        return True

    def _unless_known(self, fingerprint: bytes) -> Hashed | None:
        """Hash a fingerprint; None if a mirror has it.

        Brings the generations up to date before.
        """
        try:
            if not self._known.live:
                self._shared.join()
            if self._life.has_window and self._shared.now() >= self._life.due_at:
                self._life.turn()
        except OutageError:
            # What is known needs no server, unless too much waits for its word.
            is_trusted = self._known.live and self.unconfirmed < self._most_unconfirmed
            if is_trusted and self._is_in_a_mirror(self._known.locate(fingerprint)):
                self.mirror_hits += 1
                self.unconfirmed += 1
                return None
            raise
        hashed = self._known.locate(fingerprint)
        if not self._is_in_a_mirror(hashed):
            return hashed
        self.unconfirmed += 1
        too_many = self.unconfirmed > self._most_unconfirmed
        if too_many or time.monotonic() >= self._confirm_at:
            live = self._known.live
            self._confirm(hashed, patient=too_many)
            if self._known.live is not live:
                hashed = self._known.locate(fingerprint)
                if not self._is_in_a_mirror(hashed):
                    return hashed
        self.mirror_hits += 1
        return None

    def _is_in_a_mirror(self, hashed: Hashed) -> bool:
        block_hash, positions = hashed
        for mirror in self._known.mirrors:  # noqa: SIM110 - any() takes half as long again
            if mirror.has_hashed(block_hash, positions):
                return True
        return False

    def _is_confirmed(self) -> None:
        """Note that the server has answered: all that was said until now was right."""
        self._confirm_at = time.monotonic() + self._trust_secs
        self.unconfirmed = 0

    def _confirm(self, hashed: Hashed, *, patient: bool) -> None:
        """Ask the server whether it is still the filter that the mirrors are of."""
        begun = time.monotonic()
        self._confirm_at = begun + self._trust_secs
        newest = self._known.newest
        try:
            _, marks = self._store.blocks.look(newest, hashed, patient=patient)
            if marks == SEALED:
                self._shared.refresh()
            elif marks != ALIVE:
                self._shared.lost(newest, hashed)
            self.unconfirmed = 0
        except OutageError:
            if patient:
                raise
            # What is new will wait for the server, and tell.
            self._confirm_at = next_attempt(begun, self._trust_secs)
