"""Timing passes of calls, and what each of several took."""

import gc
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

PASSES = ("new", "duplicate")


def timed(call: Callable[[Any], Any], given: Iterable[Any]) -> tuple[float, int]:
    """Call a function with each of some values, without garbage collection in between.

    Returns:
        Seconds for all of them, and for how many it returned True.
    """
    answers = 0
    gc.collect()
    gc.disable()
    try:
        begun = perf_counter()
        for each in given:
            answers += call(each)
        return perf_counter() - begun, answers
    finally:
        gc.enable()


@dataclass
class Times:
    """Microseconds for each fingerprint or request, of each round, by who and what."""

    micros: dict[tuple[str, str], list[float]] = field(default_factory=dict)

    def note(self, who: str, what: str, micros: float) -> None:
        """One round."""
        self.micros.setdefault((who, what), []).append(micros)

    def ratios(self, who: str, base: str, what: str) -> list[float]:
        """Of two of them, in each round."""
        pairs = zip(self.micros[who, what], self.micros[base, what], strict=True)
        return [one / other for one, other in pairs]
