"""Growth of a shared filter: going on to a new generation, letting old ones expire."""

import math

from scrapy_bloom.generations.forgotten import Forgotten
from scrapy_bloom.generations.log import GenerationLog
from scrapy_bloom.redis.generations import SharedGenerations
from scrapy_bloom.redis.keys.blocks import NoRoomError
from scrapy_bloom.redis.keys.meta import RedisGeneration


class SharedGrowth:
    """Growing, turning and expiring, for all crawlers: whoever is first does it.

    Args:
        shared: the generations.
        forgotten: the forgotten requests, which expire, too.

    Attributes:
        log: what was told.
    """

    def __init__(self, shared: SharedGenerations, forgotten: Forgotten) -> None:
        self.log = GenerationLog()
        self._shared = shared
        self._known = shared.known
        self._policy = shared.wanted.policy
        self._forgotten = forgotten
        self._grow_at: float = math.inf  # at this count, a new request needs a new generation
        self._due: float = math.inf  # at this time, a generation ends or expires

    def plan(self) -> None:
        """Plan when it is time for the next generation."""
        live = self._known.live
        self._grow_at = self._policy.grow_at(live)
        if self._policy.window:
            self._due = min(self._ends(live[-1]), self._policy.next_expiry(live))

    def is_full(self) -> bool:
        """Check whether a new request needs another generation."""
        return self._known.newest.count >= self._grow_at

    def grow(self) -> None:
        """Go on to the next generation, unless there is no room, or another crawler is at it."""
        full = self._known.newest
        try:
            if not self._shared.append(self._policy.next(self._known.live), full.open_until):
                # Another crawler is making it; it may be that it dies of it.
                self._grow_at = full.count + max(1, full.capacity // 100)
                return
        except NoRoomError as error:
            self._grow_at = full.count + max(1, full.capacity // 20)
            self.log.log_cannot_grow(error)
            return
        if self._known.newest.number == full.number + 1:
            self.log.log_growth(self._known.live)

    def go_on(self, sealed: RedisGeneration) -> None:
        """Go on to the generation after one that another crawler has sealed, or make it."""
        size = self._policy.next(self._known.live)
        self._shared.follow(sealed, size, sealed.open_until)

    def begin(self) -> None:
        """Begin the crawl: make what its settings ask for and the newest generation is not."""
        if not self._known.live:
            return
        newest = self._known.newest
        if newest.open_until and not self._policy.window:
            # There is no window any more: what is recorded now shall not end with the quarter.
            try:
                self._shared.append(self._policy.first(), 0.0)
            except NoRoomError as error:
                self._shared.extend(0.0)
                self.log.log_cannot_turn(error)

    def turn_if_due(self) -> None:
        """End what has ended: go on to a new quarter, and let old generations expire."""
        if not self._policy.window or self._shared.now() < self._due:
            return
        now, ended = self._shared.now(), None
        # Again, if what another crawler has made meanwhile has ended, too.
        while self._known.newest is not ended and now >= self._ends(self._known.newest):
            ended = self._known.newest
            self._rotate(ended, now)
        if number := self._policy.expired(self._known.live, now):
            gone = [each.number for each in self._known.live[:number]]
            self.log.log_expiry(gone, self._shared.expire(number), self._policy.window)
            # Recorded before they were forgotten, they have all expired by then.
            self._forgotten.expire(2 * self._policy.window)

    def _ends(self, generation: RedisGeneration) -> float:
        """Return when a generation is over; the window may have been changed since it was made."""
        own = self._policy.open_until(generation.created_at)
        return min(generation.open_until or own, own)

    def _rotate(self, ended: RedisGeneration, now: float) -> None:
        self._shared.set_clock()
        live = self._known.live
        in_quarter = sum(g.count for g in live if g.open_until == ended.open_until)
        size = self._policy.first(in_quarter, [*self._known.kept, *live])
        try:
            is_over = self._shared.append(size, self._policy.open_until(now))
        except NoRoomError as error:
            # What is recorded in it from now on shall not expire with its quarter.
            self._shared.extend(self._policy.open_until(now))
            self._due = now + self._policy.window / 100
            self.log.log_cannot_turn(error)
            return
        if is_over:
            self.log.log_turn(ended, self._known.newest)
        else:
            # Another crawler is making it, which may take minutes. Likewise until it is there.
            self._shared.extend(now + self._policy.window / 100)
            self._due = now + self._policy.window / 200
