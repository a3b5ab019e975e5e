"""The generations of a filter that one crawl has to itself: in memory, or, derived, in files."""

import math
from collections.abc import Callable

from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.files.log import FilterLog
from scrapy_bloom.filters.bloom import BloomFilter
from scrapy_bloom.generations.lifecycle import NoRoomError, Run
from scrapy_bloom.generations.policy import Generation, Origin, Policy, Size


class LocalGeneration(Generation):
    """A generation whose bits are at hand.

    Attributes:
        unapplied: how many of those in its count are not in its bits yet: see `Overlay`.
        is_closed: its bits are gone.
    """

    filter: BloomFilter
    unapplied = 0
    is_closed = False

    def sync(self) -> None:
        """Write all changes so far to the disk; in memory, there is none."""


class MemoryGenerations:
    """The generations of a filter in memory; see `Generations`.

    Args:
        policy: sizes and times of new ones.
        origin: what all of them have in common.
        clock: seconds since 1970.
        changed: called when they are others than before.
    """

    errors = 0  # of the disk
    failure = ""  # the last of them
    begun = False  # the crawl
    held_from = math.inf  # no other crawl asks them
    next_save: float = math.inf  # at this count of the newest generation, `save` is due

    def __init__(
        self,
        policy: Policy,
        origin: Origin,
        *,
        clock: Callable[[], float],
        changed: Callable[[], None],
    ) -> None:
        self.live: list[LocalGeneration] = []
        self.kept: list[LocalGeneration] = []
        self.run = Run(policy)
        self._policy = policy
        self._origin = origin
        self._clock = clock
        self._changed = changed

    @property
    def location(self) -> str:
        """Return where they are, for people; also after the close."""
        return "memory"

    def open(self, log: FilterLog | None = None) -> None:
        """Find the generations that there are; in memory there are none, and no log."""

    def checkpoint_soon(self) -> None:
        """Have changes taken over from the log now, if there is one."""

    def unlock(self) -> None:
        """Leave what was opened to others."""

    def make_first(self) -> None:
        """Make the first generation; raises StorageError."""
        size = self._policy.first()
        try:
            now = self.now()
            self.live.append(self._make(size, 1, now, self._policy.open_until(now)))
        except MemoryError:
            raise StorageError(
                f"there is no memory for a filter of {size.geometry.nbytes:,} bytes; lower "
                "BLOOM_EXPECTED_REQUESTS, or set BLOOM_DIR or JOBDIR to keep it in a file"
            ) from None

    def begin(self) -> None:
        """Begin the crawl: from now on, changes are written down."""
        self.begun = True
        self.save()

    def save(self) -> None:
        """Write down the figures of the newest generation."""

    def now(self) -> float:
        """See `Generations`."""
        # If the clock was set back, time stands still until it has caught up: a request may be
        # remembered for longer, but never for less than the window.
        newest = self.live[-1].created_at if self.live else 0.0
        return max(self._clock(), newest)

    def ends(self, newest: Generation) -> float:
        """See `Generations`."""
        return newest.open_until

    def append(self, size: Size, created_at: float, open_until: float) -> bool:
        """See `Generations`. An empty generation goes on in place of another one."""
        full = self.live[-1]
        if not full.count:
            self.extend(open_until)
            return True
        self.save()  # the last figures of the full one
        try:
            new = self._make(size, full.number + 1, created_at, open_until)
        except (StorageError, MemoryError) as error:
            raise NoRoomError(str(error)) from error
        self.live.append(new)
        self._changed()
        return True

    def extend(self, open_until: float) -> None:
        """See `Generations`."""
        self.live[-1].open_until = open_until
        self._changed()

    def expire(self, number: int) -> None:
        """See `Generations`."""
        gone = self.live[:number]
        del self.live[:number]
        self.kept += [each for each in gone if self.run.keeps(each)]
        self._changed()

    def close(self) -> None:
        """End; raises StorageError."""

    def _make(
        self, size: Size, number: int, created_at: float, open_until: float
    ) -> LocalGeneration:
        new = LocalGeneration.of(size, number, created_at, open_until=open_until)
        new.filter = size.filter(self.live[0].filter.salt if self.live else self._origin.salt)
        return new
