"""Decide when a generation is added, and when the oldest ones expire.

The rules are the same for all storages. In a shared storage, any crawl may be the first to make a
change that is due.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.generations.policy import FilterStatus, Generation, Policy
from scrapy_bloom.text import counted, duration_text

logger = logging.getLogger(__name__)


class NoRoomError(StorageError):
    """The storage has no room for another generation."""


class Generations(Protocol):
    """A storage of generations. After each change of them, it calls `LifeCycle.plan`."""

    @property
    def live(self) -> Sequence[Generation]:
        """Return the generations that have not expired, oldest first."""

    def update(self, run_at: float, new: Generation | None = None, expired: int = 0) -> bool:
        """Have a new generation, or the newest, record for a run, and remove the oldest ones.

        All of this is one step. Raises NoRoomError. Returns False if another crawl has changed the
        generations: nothing is done.
        """


class LifeCycle:
    """Adds and removes the generations of a filter when that is due."""

    grow_at: float  # the count of the newest generation at which `grow` must be called
    due_at: float  # the time at which `begin_run` must be called with it; usually infinite

    def __init__(self, policy: Policy, store: Generations) -> None:
        self._policy = policy
        self._store = store
        self._expired = 0  # how many requests have expired
        self._times_no_room = 0
        self._failure = ""  # why there was no room, the last time
        self._has_room = True

    def plan(self) -> None:
        """Plan when the next changes are due, after a change of the generations."""
        newest = self._store.live[-1]
        self.grow_at, self.due_at = newest.capacity, self._policy.next_begin(newest)

    def is_full(self) -> bool:
        """Return whether a new request needs another generation."""
        return self._store.live[-1].count >= self.grow_at

    def grow(self) -> None:
        """Add the next generation, unless there is no room, or another crawl has added it."""
        store = self._store
        full = store.live[-1]
        try:
            if store.update(full.last_run, self._policy.next(store.live)):
                self._log_growth()
        except NoRoomError as error:
            self.grow_at = full.count + max(1, full.capacity // 20)
            self._log_no_room(
                "The crawl continues with the full filter, whose false-positive rate rises, and "
                "tries again after some more requests",
                error,
            )

    def begin_run(self, run_at: float) -> bool:
        """Do what is due when a run begins, once for each run; return whether it is done.

        If it is not, another crawl has changed the generations: call this again. If another run
        began later, for example because the clock was set back, nothing is due.
        """
        store, policy = self._store, self._policy
        *older, newest = store.live
        if run_at <= newest.last_run:
            return True
        new, expired = None, policy.expired(older, run_at)
        if policy.is_turn(newest, run_at):
            expired = policy.expired(store.live, run_at)
            new = policy.after_turn(newest, expired, run_at)
        try:
            is_done = store.update(run_at, new, len(expired))
            self._has_room = self._has_room or new is not None
        except NoRoomError as error:
            self._log_no_room("Requests stay recorded for longer than BLOOM_WINDOW_SECS", error)
            expired = policy.expired(older, run_at)
            is_done = store.update(run_at, None, len(expired))
        if is_done:
            self._log_expiry(sum(generation.count for generation in expired))
        return is_done

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
            counted(sum(generation.count for generation in live), "request"),
            newest.number,
            f"{newest.capacity:,}",
            newest.error_rate,
            f"{newest.geometry.nbytes:,}",
        )

    def _log_expiry(self, count: int) -> None:
        self._expired += count
        if count:
            logger.info(
                "%s expired after BLOOM_WINDOW_SECS (%s): they are crawled again if the crawl "
                "finds a link to them",
                counted(count, "request has", "requests have"),
                duration_text(self._policy.window),
            )

    def status(self, location: str) -> FilterStatus:
        """Return the current figures of the filter, or of the one that is created next."""
        live = self._store.live or [self._policy.first()]
        return FilterStatus(
            location=location,
            generations=[replace(generation) for generation in live],
            configured_rate=self._policy.error_rate,
            errors=self._times_no_room,
            failure=self._failure,
            expired=self._expired,
        )
