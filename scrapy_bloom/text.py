"""Texts for people: figures as they write and read them, and untrusted texts made harmless."""

import contextlib
import math
import re
import time
import unicodedata
from collections.abc import Mapping

_PRACTICALLY_0 = 1e-15  # smaller figures are printed as "practically 0"; no rate can be set lower
TIMES = {"k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9, "t": 10**12}
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}
LOGIN_FORM = "[[user]:password@]"  # as messages show it; no valid URL contains this

_CONTROLS = {"Cc", "Cf", "Cs", "Zl", "Zp"}  # categories of Unicode
_JOINERS = "\u200c\u200d"  # harmless; some scripts and emoji need them


def parsed_number(text: str, units: Mapping[str, int] = TIMES) -> float:
    """Return the number in a text, which may end with a unit, or NaN if it is none.

    >>> [parsed_number(text) for text in ("10k", "2.5M", "1e9", "1_000", "1e-6")]
    [10000, 2500000.0, 1000000000.0, 1000, 1e-06]
    >>> [parsed_number(text, SECONDS) for text in ("90", "90s", "1.5m", "12h", "7d", "2w")]
    [90, 90, 90.0, 43200, 604800, 1209600]
    """
    digits = text.strip().lower()
    unit = units.get(digits[-1:], 0)
    if unit:
        digits = digits[:-1].rstrip()
    # Integers are tried first, because a float would round 1_000_000_000_001.
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(digits) * (unit or 1)
    return math.nan


def number_text(value: float, digits: int = 3) -> str:
    """Return a figure for people: with commas if it is whole, else with significant digits only.

    >>> number_text(1_000_000), number_text(0.0329871), number_text(3.02e-7), number_text(1.5e-23)
    ('1,000,000', '0.033', '3.02e-07', 'practically 0')
    >>> number_text(123.4, 2), number_text(99.7, 2), number_text(12.3, 1)
    ('123', '100', '12')
    """
    if 0 < abs(value) < _PRACTICALLY_0:
        return "practically 0"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(float(f"{value:.{digits}g}")) >= 10**digits:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """Return a number with its noun, in the singular or the plural.

    >>> counted(1, "line"), counted(1000, "line"), counted(0, "entry is", "entries are")
    ('1 line', '1,000 lines', '0 entries are')
    """
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def in_short(value: float) -> str:
    """Return a number of requests with a unit, in a form that the command line accepts.

    >>> in_short(0), in_short(1_234_567), in_short(2.5e9)
    ('0', '1.23M', '2.5B')
    """
    for unit, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * unit:
            return f"{value / unit:.3g}{letter}"
    return f"{value:.3g}"


def share_text(share: float) -> str:
    """Return a share as a percentage."""
    return f"{number_text(100 * share)} %"


def size_text(nbytes: int) -> str:
    """Return a size in units of 1,024 bytes.

    >>> size_text(8192), size_text(3_604_480), size_text(3_604_480 * 1024)
    ('8.0 KiB', '3.4 MiB', '3.4 GiB')
    """
    value, units = nbytes / 1024, ["KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.1f} {units[0]}"


def time_text(seconds: float) -> str:
    """Return a time, given in seconds since 1970, as a date and time of day in UTC."""
    try:
        return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))
    except (OverflowError, ValueError, OSError):  # it comes from a file or a server
        return "an unknown time"


def is_control(char: str) -> bool:
    """Return whether a character controls the terminal, ends a line or reorders text."""
    return unicodedata.category(char) in _CONTROLS and char not in _JOINERS


def escaped(text: str) -> str:
    r"""Return an untrusted text with escapes, so that it is safe in a terminal or a log.

    >>> print(escaped("caf\xe9 \x1b[2J\n\u202e\u4e2d"))
    café \x1b[2J\n\u202e中
    """
    if text.isprintable():
        return text
    return "".join(repr(char)[1:-1] if is_control(char) else char for char in text)


def masked(text: str) -> str:
    """Return a text without the passwords and options of URLs, even misspelt ones.

    >>> masked("redis://me:secret@host/0?password=secret is away, and so is redis:secret@host")
    'redis://***@host/0?*** is away, and so is redis:***@host'
    """
    return re.sub(
        r"\S+", lambda word: word[0] if LOGIN_FORM in word[0] else masked_url(word[0]), text
    )


def masked_url(word: str) -> str:
    """Return a text that is at most one URL, which may contain spaces, without its password.

    >>> masked_url("redis://me:my secret@host"), masked_url("jobs/shop")
    ('redis://***@host', 'jobs/shop')
    """
    scheme, colon, place = word.partition(":" if {"@", "?"} & set(word) else ":/")
    if not colon:
        return word
    place = place.lstrip("/")  # taken for a path, a URL loses one of its slashes
    scheme = word[: len(word) - len(place)]
    place, *options = re.split("([?#])", place, maxsplit=1)
    login, at, host = place.rpartition("@")
    if "/" in login or "@" in "".join([login, *options]):  # a part of a password, perhaps
        return f"{scheme}***"
    return f"{scheme}{'***@' if at else ''}{host}{f'{options[0]}***' if options else ''}"
