"""Amounts as people write them, in settings and on the command line: 5M requests, 7d."""

import math
import re

_TIMES = {"k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9, "t": 10**12}
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}
_THOUSANDS = re.compile(r"\d{1,3}(,\d{3})+")  # 1,5 may mean 15 to some, and 1.5 to others


def number(text: str) -> float:
    """Return the number that a text says; NaN if none.

    >>> [number(text) for text in ("10k", "2.5M", "1e9", "1_000", "1,000", "1e-6")]
    [10000, 2500000.0, 1000000000.0, 1000, 1000, 1e-06]
    """
    return _amount(text, _TIMES)


def seconds(text: str) -> float:
    """Return the seconds of a duration; NaN if it is none.

    >>> [seconds(text) for text in ("90", "90s", "1.5m", "12h", "7d", "2w")]
    [90, 90, 90.0, 43200, 604800, 1209600]
    """
    return _amount(text, _SECONDS)


def _amount(text: str, units: dict[str, int]) -> float:
    digits = text.strip().lower()
    unit = units.get(digits[-1:], 0)
    if unit:
        digits = digits[:-1].rstrip()
    if "," in digits:
        if not _THOUSANDS.fullmatch(digits):
            return math.nan
        digits = digits.replace(",", "")
    try:
        # Not by floats where that can be spared: 1_000_000_000_001 is a number, too.
        return int(digits) * (unit or 1)
    except ValueError:
        pass
    try:
        return float(digits) * (unit or 1)
    except ValueError:
        return math.nan
