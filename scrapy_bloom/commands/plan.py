"""Print how large a filter will be, and how many pages it is expected to skip.

Give numbers of requests (10k, 5M, 1e9) and error rates (1e-6, 0.1%) in any
order; several of them make a table. In Redis, a filter grows with the crawl,
up to its size. "False positives" are the new requests that the whole crawl is
expected to skip because the filter mistakes them for duplicates. The figures
are without BLOOM_WINDOW_SECS.

Examples:
  scrapy bloom plan 100M 1e-9
  scrapy bloom plan 1M 10M 100M 1e-6 1e-9
"""

import argparse
import math

from scrapy.settings import Settings

from scrapy_bloom.commands.shared.cli import Columns, Figures, add_shared, print_json, print_table
from scrapy_bloom.filters.sizing import MAX_CAPACITY, MIN_ERROR_RATE, expected_false_positives
from scrapy_bloom.generations.policy import Policy
from scrapy_bloom.settings import BloomSettings
from scrapy_bloom.text import number_text, parsed_number, size_text

SCRAPY_SET_BYTES = 91  # per request, as docs/benchmarks.md has measured

_COLUMNS: Columns = (
    ("requests", "requests", number_text),
    ("error rate", "error_rate", "{:g}".format),
    ("size", "bytes", size_text),
    ("false positives", "expected_false_positives", number_text),
    ("bits/request", "bits_per_request", "{:.1f}".format),
    ("hashes", "hashes", str),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "figures",
        nargs="*",
        type=requests_or_rate,
        metavar="N|P",
        help="numbers of requests and error rates",
    )
    add_shared(parser, "--json")


def run(options: argparse.Namespace, settings: Settings) -> None:
    bloom = BloomSettings.from_settings(settings)
    counts = [figure for figure in options.figures if isinstance(figure, int)]
    rates = [figure for figure in options.figures if isinstance(figure, float)]
    plans = [
        _plan(count, rate)
        for count in counts or [bloom.expected_requests]
        for rate in rates or [bloom.error_rate]
    ]
    print_json(plans) if options.json else print_table(_COLUMNS, plans)


def _plan(requests: int, error_rate: float) -> Figures:
    geometry = Policy(expected=requests, error_rate=error_rate).first().geometry
    return {
        "requests": requests,
        "error_rate": error_rate,
        "bytes": geometry.nbytes,
        "expected_false_positives": expected_false_positives(*geometry, requests),
        "bits_per_request": geometry.num_bits / requests,
        "hashes": geometry.num_hashes,
    }


def requests_or_rate(text: str) -> int | float:
    """Return a number of requests (an int, at least 1) or an error rate (a float below 1).

    >>> [requests_or_rate(text) for text in ("10k", "2.5M", "1e9", "1_000", "1e-6", "0.1%")]
    [10000, 2500000, 1000000000, 1000, 1e-06, 0.001]
    """
    value = parsed_number(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    if MIN_ERROR_RATE <= value < 1:
        return value
    if math.isfinite(value) and value == int(value) and 1 <= value <= MAX_CAPACITY:
        return int(value)
    raise argparse.ArgumentTypeError(
        f"{text!r} is neither a number of requests nor an error rate; use a whole number from 1 to "
        f"{MAX_CAPACITY:,}, for example 10k or 5M, or a number between 0 and 1 (at least "
        f"{MIN_ERROR_RATE}), for example 1e-6 or 0.1%"
    )
