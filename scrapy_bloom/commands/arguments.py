"""Amounts on the command line, and the ranges they are allowed in."""

import argparse
import math

from scrapy_bloom import amounts
from scrapy_bloom.sizing import MAX_CAPACITY, MIN_ERROR_RATE


def requests(text: str) -> int:
    """A number of requests: 10k, 5M, 1e9, 1_000_000, 2.5B.

    >>> [requests(text) for text in ("10k", "2.5M", "1e9", "1_000_000", "1,000")]
    [10000, 2500000, 1000000000, 1000000, 1000]

    Raises:
        argparse.ArgumentTypeError: it is none, or out of range.
    """
    value = amounts.number(text)
    if not math.isfinite(value) or value != int(value) or not 1 <= value <= MAX_CAPACITY:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no number of requests; allowed is a whole number from 1 to "
            f"{MAX_CAPACITY:,}, for example 10k, 5M, 1e9 or 1_000_000"
        )
    return int(value)


def error_rate(text: str) -> float:
    """An error rate: 1e-6, 0.001, 0.1%.

    >>> error_rate("1e-6"), error_rate("0.1%")
    (1e-06, 0.001)

    Raises:
        argparse.ArgumentTypeError: it is none, or out of range.
    """
    value = amounts.number(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    if not MIN_ERROR_RATE <= value < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no error rate; allowed is a number between 0 and 1 (at least "
            f"{MIN_ERROR_RATE}), for example 1e-6 or 0.1%"
        )
    return value


def requests_or_rate(text: str) -> int | float:
    """Either, told apart by their size: an int is a number of requests, a float a rate."""
    if text.endswith("%") or amounts.number(text) < 1:
        return error_rate(text)
    return requests(text)
