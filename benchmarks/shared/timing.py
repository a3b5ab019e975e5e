"""Timing many calls."""

import gc
from collections.abc import Callable, Iterable
from time import perf_counter
from typing import Any


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
