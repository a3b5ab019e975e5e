"""Decide when a generation is added, and when a quarter of a time window ends or expires.

The rules are the same for all storages. In a shared storage, any crawl may be the first to make a
change that is due.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.generations.policy import FilterStatus, Generation, Policy, Size
from scrapy_bloom.text import counted

logger = logging.getLogger(__name__)


class NoRoomError(StorageError):
    """The storage has no room for another generation."""


class Generations(Protocol):
    """A storage of generations. After each change of them, it calls `LifeCycle.plan`."""

    @property
    def live(self) -> Sequence[Generation]:
        """Return the generations that have not expired, oldest first."""

    @property
    def kept_from(self) -> float:
        """Return the number of the first generation that must not end; infinite: none."""

    def now(self) -> float:
        """Return the time in seconds since 1970, never before the newest was created."""

    def ends(self, newest: Generation) -> float:
        """Return when the newest generation ends, with a window."""

    def append(self, size: Size, created_at: float, open_until: float) -> bool:
        """Add a generation for new requests; return False if another crawl is adding one.

        Both times are in seconds since 1970; an end of 0 means never. Raises NoRoomError.
        """

    def extend(self, open_until: float) -> None:
        """Set the end of the newest generation, in seconds since 1970; 0: it does not end."""

    def expire(self, number: int) -> None:
        """Remove the `number` oldest generations."""


class LifeCycle:
    """Adds, ends and removes the generations of a filter when that is due.

    Attributes:
        has_window: whether requests expire.
        grow_at: the count of the newest generation at which `grow` must be called.
        due_at: the time at which `turn` must be called, with a window.
    """

    grow_at: float
    due_at: float
    _turn_at: float  # the time at which the newest generation ends

    def __init__(self, policy: Policy, store: Generations) -> None:
        self.has_window = policy.window > 0
        self._policy = policy
        self._store = store
        self._expired = 0  # how many requests have expired
        self._times_no_room = 0
        self._failure = ""  # why there was no room, the last time
        self._has_room = True

    def plan(self) -> None:
        """Plan when the next changes are due, after a change of the generations."""
        live = self._store.live
        self.grow_at = live[-1].capacity
        if self.has_window:
            self._turn_from(self._store.ends(live[-1]))

    def is_full(self) -> bool:
        """Return whether a new request needs another generation."""
        return self._store.live[-1].count >= self.grow_at

    def grow(self) -> None:
        """Add the next generation, unless there is no room, or another crawl is adding it."""
        full = self._store.live[-1]
        try:
            size, now = self._policy.next(self._store.live), self._store.now()
            if not self._store.append(size, now, full.open_until):
                # Another crawl is adding it, but may die before it has done so.
                self.grow_at = full.count + max(1, full.capacity // 100)
                return
        except NoRoomError as error:
            self.grow_at = full.count + max(1, full.capacity // 20)
            self._log_no_room(
                "The crawl continues with the full filter, whose false-positive rate rises, and "
                "tries again after some more requests",
                error,
            )
            return
        if self._store.live[-1].number == full.number + 1:
            self._log_growth()

    def turn(self) -> None:
        """Begin a new quarter of the window if one has ended, and remove expired generations."""
        now, ended = self._store.now(), None
        # Repeated if the generation that another crawl has added has ended, too.
        while now >= self._turn_at and self._store.live[-1] is not ended:
            ended = self._store.live[-1]
            if ended.number >= self._store.kept_from:
                self._store.extend(self._policy.open_until(now))
            else:
                self._begin_quarter(ended, now)
        may_expire = sum(each.number < self._store.kept_from for each in self._store.live)
        if number := min(self._policy.expired(self._store.live, now), may_expire):
            gone = self._store.live[:number]
            self._store.expire(number)
            self._log_expiry(gone)

    def _turn_from(self, when: float) -> None:
        self._turn_at = when
        live = self._store.live
        may_expire = live[0].number < self._store.kept_from
        self.due_at = min(when, self._policy.next_expiry(live) if may_expire else float("inf"))

    def _begin_quarter(self, ended: Generation, now: float) -> None:
        live, window = self._store.live, self._policy.window
        in_quarter = sum(each.count for each in live if each.open_until == ended.open_until)
        size = self._policy.first(in_quarter)
        next_end = self._policy.open_until(now)
        try:
            is_appended = self._store.append(size, now, next_end)
        except NoRoomError as error:
            # Requests that are recorded from now on must not expire with the quarter.
            self._store.extend(next_end)
            self._turn_from(now + window / 100)
            self.log_cannot_turn(error)
            return
        if not is_appended:
            # Another crawl is adding it, which may take minutes. Until then, the newest stays open.
            self._store.extend(now + window / 100)
            self._turn_from(now + window / 200)
        elif (newest := self._store.live[-1]) is not ended:
            self._log_turn(ended, newest)

    def log_cannot_turn(self, error: NoRoomError) -> None:
        """Log that there is no room for the generation of the next quarter."""
        self._log_no_room("Requests stay recorded for longer than BLOOM_WINDOW_SECS", error)

    def _log_no_room(self, consequence: str, error: NoRoomError) -> None:
        self._times_no_room += 1
        self._failure = f"the filter is full, and there is no room for another generation: {error}"
        if self._has_room:  # logged once, until there is room again
            self._has_room = False
            logger.error("No room for a new generation: %s. %s", error, consequence)

    def _log_growth(self) -> None:
        self._has_room = True
        live = self._store.live
        newest = live[-1]
        logger.info(
            "The filter is full with %s and grows: generation %d has room for %s more at a "
            "false-positive rate of %.2g, in %s bytes",
            counted(sum(each.count for each in live), "request"),
            newest.number,
            f"{newest.capacity:,}",
            newest.error_rate,
            f"{newest.geometry.nbytes:,}",
        )

    def _log_turn(self, ended: Generation, newest: Generation) -> None:
        self._has_room = True
        logger.info(
            "A quarter of the time window has ended: generation %d records new requests, and "
            "generation %d with %s is kept until it expires",
            newest.number,
            ended.number,
            counted(ended.count, "request"),
        )

    def _log_expiry(self, gone: Sequence[Generation]) -> None:
        count = sum(each.count for each in gone)
        self._expired += count
        logger.info(
            "%s recorded more than %g seconds ago %s expired, with generation %s",
            counted(count, "request"),
            self._policy.window,
            "has" if count == 1 else "have",
            ", ".join(str(each.number) for each in gone),
        )

    def status(self, location: str, live: Sequence[Generation]) -> FilterStatus:
        """Return the current figures of the filter.

        Args:
            location: where the filter is stored, for messages.
            live: its live generations, oldest first.
        """
        return replace(
            FilterStatus.of(location, live, self._policy.error_rate),
            errors=self._times_no_room,
            failure=self._failure,
            expired=self._expired,
        )
