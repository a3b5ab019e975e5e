"""Recording and asking in a shared filter: its mirrors first, then the server."""

import math
from collections.abc import Callable, Sequence
from time import monotonic

from scrapy_bloom.exceptions import OutageError, StorageError
from scrapy_bloom.filters.hashing import Hashed
from scrapy_bloom.generations.backoff import next_attempt
from scrapy_bloom.generations.lifecycle import LifeCycle
from scrapy_bloom.redis.connection.server import ReplacedError
from scrapy_bloom.redis.generations import SharedGenerations
from scrapy_bloom.redis.keys.blocks import ALIVE, SEALED
from scrapy_bloom.redis.keys.meta import RedisGeneration
from scrapy_bloom.redis.view import View

_BATCH = 256  # fingerprints recorded at once
_MOST_CHANGES = 100  # of the generations, while one fingerprint is recorded
_MOST_UNCONFIRMED = 1000  # answers of the mirrors, where these may turn out to be wrong


class SharedLookup:
    """Asking and recording over all live generations of a shared filter.

    A question goes to one view of the generations. If they turn out to be others meanwhile, its
    answer is None, and it is asked again. A sealed generation is asked once: bits that were set
    there since tell nothing, be they our own or of another crawler that came too late.
    """

    def __init__(self, shared: SharedGenerations, life: LifeCycle, trust_secs: float) -> None:
        self.mirror_hits = 0  # how often a mirror knew the answer
        self.unconfirmed = 0  # how often it did since the server's last word
        self._most_unconfirmed = _MOST_UNCONFIRMED if shared.queue_is_shared else math.inf
        self._shared = shared
        self._life = life
        self._blocks = shared.store.blocks
        self._server = shared.store.server
        self._trust_secs = trust_secs
        self._confirm_at = 0.0  # on a monotonic clock

    def add(self, fingerprint: bytes) -> bool:
        """See `RedisBackend.add`."""
        return self._unless_replaced(self._add, fingerprint, self._server.retries)

    def _add(self, fingerprint: bytes, retries: int) -> bool:
        hashed = self._hash_of_unknown(fingerprint)
        if hashed is None:
            return False
        view = self._shared.view
        new = self._until_settled(self._record, fingerprint, hashed)
        view.note_known(fingerprint)  # in vain, if there is another view meanwhile
        self._trust()
        if not new and self._server.retries == retries:
            return False
        self._shared.count()
        return True

    def record_anew(self, fingerprint: bytes) -> None:
        """Record a fingerprint that an older generation has in the newest one, too."""
        view = self._shared.view
        if self._blocks.record(view.newest, view.locate(fingerprint))[0]:
            self._shared.count()

    def add_many(self, fingerprints: Sequence[bytes]) -> int:
        """See `RedisBackend.add_many`."""
        added = position = 0
        while position < len(fingerprints):
            if not self._shared.live:
                self._shared.join()
            # So few that it is hardly fuller than it may be.
            few = min(_BATCH, self._shared.view.newest.capacity // 100)
            number = 1 if self._life.is_full() else max(1, few)
            batch = fingerprints[position : position + number]
            added += self._add_batch(batch) if number > 1 else self.add(batch[0])
            position += number
        return added

    def _add_batch(self, fingerprints: Sequence[bytes]) -> int:
        """Record fingerprints that no older generation has, with one round trip; count the new."""
        newest, added, unknown = self._shared.view.newest, 0, []
        for fingerprint in fingerprints:
            hashed = self._hash_of_unknown(fingerprint)
            if hashed is not None and not self._is_in_older(self._shared.view, hashed, set()):
                unknown.append((fingerprint, hashed))
        if self._shared.view.newest is not newest or not unknown:
            return sum(self.add(fingerprint) for fingerprint, _ in unknown)
        answers = self._blocks.record_many(newest, [hashed for _, hashed in unknown])
        for (fingerprint, hashed), answer in zip(unknown, answers, strict=True):
            is_new = self._settled(newest, hashed, answer)
            if is_new is None:
                again = self._shared.view.locate(fingerprint)  # perhaps with another salt
                is_new = self._until_settled(self._record, fingerprint, again, newest.id)
            if is_new:
                added += 1
                self._shared.count()
        return added

    def __contains__(self, fingerprint: bytes) -> bool:
        return self._unless_replaced(self._has, fingerprint)

    def _has(self, fingerprint: bytes) -> bool:
        hashed = self._hash_of_unknown(fingerprint)
        if hashed is None:
            return True
        new = self._until_settled(self._is_new, fingerprint, hashed)
        self._trust()
        return not new

    def confirm(self) -> None:
        """Ask the server whether the filter is still the one that the mirrors are of."""

        def ask() -> bool:
            view = self._shared.view
            if view.live:
                self._confirm(view, view.locate(b""), patient=True)
            return True

        self._unless_replaced(ask)

    def _unless_replaced(self, operation: Callable[..., bool], *args: object) -> bool:
        """Do something; if another server answers now, forget all and do it again."""
        if not self._shared.queue_is_shared:
            return operation(*args)
        server = self._server
        replaced = server.was_replaced()
        server.is_watched = True
        try:
            for _ in range(_MOST_CHANGES):
                try:
                    if replaced:
                        self._shared.begin_anew()
                    return operation(*args)
                except ReplacedError:
                    replaced = True
                    server.retries += 1  # it may have been done
        finally:
            server.is_watched = False
        raise self._always_changing()

    def _until_settled(
        self,
        ask: Callable[[View, Hashed, set[str]], bool | None],
        fingerprint: bytes,
        hashed: Hashed,
        without: str = "",
    ) -> bool:
        """Ask, until the generations are not others meanwhile; leave one out that was asked."""
        asked = {without}
        for _ in range(_MOST_CHANGES):
            answer = ask(self._shared.view, hashed, asked)
            if answer is not None:
                return answer
            hashed = self._shared.view.locate(fingerprint)  # perhaps with another salt
        raise self._always_changing()

    def _always_changing(self) -> StorageError:
        store = self._shared.store
        return StorageError(
            f"{store.server.address}: the generations of {store.key!r} change all the time"
        )

    def _hash_of_unknown(self, fingerprint: bytes) -> Hashed | None:
        """Bring the generations up to date, and hash a fingerprint; None if a mirror has it."""
        try:
            if not self._shared.view.live:
                self._shared.join()
            if self._life.has_window and self._shared.now() >= self._life.due_at:
                self._life.turn()
        except OutageError:
            # What is known needs no server, unless too much waits for its word.
            view = self._shared.view
            is_trusted = view.live and self.unconfirmed < self._most_unconfirmed
            if is_trusted and view.hash_of_unknown(fingerprint) is None:
                self.mirror_hits += 1
                self.unconfirmed += 1
                return None
            raise
        view = self._shared.view
        hashed = view.hash_of_unknown(fingerprint)
        if hashed is not None:
            return hashed
        self.unconfirmed += 1
        too_many = self.unconfirmed > self._most_unconfirmed
        if too_many or monotonic() >= self._confirm_at:
            self._confirm(view, view.locate(fingerprint), patient=too_many)
            view = self._shared.view
            if not view.live:  # it was lost, and the server is away before another one is begun
                return self._hash_of_unknown(fingerprint)
            hashed = view.hash_of_unknown(fingerprint)  # perhaps with another salt
            if hashed is not None:
                return hashed
        self.mirror_hits += 1
        return None

    def _trust(self) -> None:
        """Trust the mirrors: the server has answered, so what they said until now was right."""
        self._confirm_at = monotonic() + self._trust_secs
        self.unconfirmed = 0

    def _confirm(self, view: View, hashed: Hashed, *, patient: bool) -> None:
        """Ask the server whether it is still the filter that the mirrors are of."""
        begun = monotonic()
        self._confirm_at = begun + self._trust_secs
        try:
            _, marks = self._blocks.look(view.newest, hashed, patient=patient)
            if marks == SEALED:
                self._shared.refresh()
            elif marks != ALIVE:
                self._shared.lost(view.newest, hashed)
            self.unconfirmed = 0
        except OutageError:
            if patient:
                raise
            # What is new will wait for the server, and tell.
            self._confirm_at = next_attempt(begun, self._trust_secs)

    def _record(self, view: View, hashed: Hashed, asked: set[str]) -> bool | None:
        """Set the bits where they belong; False if they were set before."""
        if self._life.is_full():
            is_new = self._is_new(view, hashed, asked)
            if not is_new:
                return is_new
            self._life.grow()
        elif view.older and self._is_in_older(view, hashed, asked):
            return False
        if self._shared.view is not view:
            return None
        new = self._settled(view.newest, hashed, self._blocks.record(view.newest, hashed))
        if new is None:
            asked.add(view.newest.id)
        return new

    def _settled(
        self, newest: RedisGeneration, hashed: Hashed, answer: tuple[bool, int]
    ) -> bool | None:
        """Act upon the server's answer; return whether it was new, None if it belongs elsewhere."""
        new, marks = answer
        if marks == SEALED:
            # In what is sealed, others do not look for it any more.
            if self._shared.view.newest is newest:
                if new:
                    self._shared.follow(newest)
                else:
                    self._shared.refresh()
            return None if new else False
        if marks != ALIVE:
            self._shared.lost(newest, hashed)
            if self._shared.view.newest is not newest:
                return None
        if newest.mirror is not None:
            block_hash, positions = hashed
            newest.mirror.add_hashed(block_hash, positions[: newest.geometry.num_hashes])
        return new

    def _is_new(self, view: View, hashed: Hashed, asked: set[str]) -> bool | None:
        """Check that no generation has a fingerprint."""
        if self._is_in_older(view, hashed, asked):
            return False
        if self._shared.view is not view:
            return None
        seen, marks = self._blocks.look(view.newest, hashed)
        if marks == SEALED and not seen:
            self._shared.refresh()
        elif marks not in {ALIVE, SEALED}:
            self._shared.lost(view.newest, hashed)
        return not seen if self._shared.view.newest is view.newest else None

    def _is_in_older(self, view: View, hashed: Hashed, asked: set[str]) -> bool:
        """Check whether one before the newest has it; False too if they turn out to change."""
        for each in view.older:
            if each.id in asked:
                continue
            seen, marks = self._blocks.look_sealed(each, hashed)
            if marks not in {ALIVE, SEALED}:
                self._shared.lost(each, hashed)
                if self._shared.view is not view:
                    return False
            if seen:
                return True
            asked.add(each.id)  # it was sealed before we asked
        return False
