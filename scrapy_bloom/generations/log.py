"""Log lines and counts of changes to a filter's generations."""

import logging
from collections.abc import Sequence

from scrapy_bloom.generations.policy import Generation

logger = logging.getLogger(__name__)


class GenerationLog:
    """Logs how the generations of a filter change, wherever they are kept.

    Attributes:
        errors: how often there was no room for a new generation.
        failure: why, the last time; empty if there was.
        expired: requests forgotten because their time window was over.
    """

    def __init__(self) -> None:
        self.errors = self.expired = 0
        self.failure = ""
        self._no_room = False

    def log_growth(self, live: Sequence[Generation]) -> None:
        """Log that the newest generation was added, since the one before it is full."""
        self._no_room = False
        newest = live[-1]
        logger.info(
            "The filter is full with %s requests and grows: generation %d has room for %s more at "
            "error rate %.2g, in %s bytes",
            f"{sum(each.count for each in live):,}",
            newest.number,
            f"{newest.capacity:,}",
            newest.error_rate,
            f"{newest.geometry.nbytes:,}",
        )

    def log_turn(self, ended: Generation, newest: Generation) -> None:
        """Log that the newest generation was added, since the quarter before it is over."""
        self._no_room = False
        logger.info(
            "A quarter of the time window is over: generation %d takes what is new, generation %d "
            "with %s requests counts until it expires",
            newest.number,
            ended.number,
            f"{ended.count:,}",
        )

    def log_expiry(self, gone: Sequence[Generation], window: float) -> None:
        """Log that generations have expired."""
        count = sum(each.count for each in gone)
        self.expired += count
        logger.info(
            "%s requests recorded more than %g seconds ago are forgotten: generation %s expired",
            f"{count:,}",
            window,
            ", ".join(str(each.number) for each in gone),
        )

    def log_cannot_grow(self, error: Exception) -> None:
        """Log that there is no room for the generation that shall follow a full one."""
        self._log_cannot_add(
            "The crawl goes on with the full filter, its error rate rises, and growing is tried "
            "again after some more requests",
            error,
        )

    def log_cannot_turn(self, error: Exception) -> None:
        """Log that there is no room for the generation of the next quarter."""
        self._log_cannot_add("Requests are remembered for longer than BLOOM_WINDOW_SECS", error)

    def _log_cannot_add(self, consequence: str, error: Exception) -> None:
        self.errors += 1
        self.failure = f"the filter is full, and there is no room for more of it: {error}"
        if not self._no_room:  # once, until there is room again
            self._no_room = True
            logger.error("No room for a new generation: %s. %s", error, consequence)
