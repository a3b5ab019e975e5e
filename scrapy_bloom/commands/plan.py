"""Print how large a filter will be, and how many pages it is expected to lose.

Give numbers of requests (10k, 5M, 1e9, 1_000_000) and error rates (1e-6, 0.1%) in any order;
several of them make a table. In Redis, a filter grows with the crawl, up to its size. "False
positives" are the new requests that the whole crawl is expected to skip because the filter
mistakes them for duplicates.

Examples:
  scrapy bloom plan 100M 1e-9
  scrapy bloom plan 1M 10M 100M 1e-6 1e-9
  scrapy bloom plan 5M 1e-9 --json
"""

import argparse
from dataclasses import replace
from typing import Any

from scrapy.settings import Settings

from scrapy_bloom.commands.shared.arguments import add_json, requests_or_rate
from scrapy_bloom.commands.shared.output import note, print_json, print_table, say
from scrapy_bloom.filters.sizing import MIN_ERROR_RATE, expected_false_positives
from scrapy_bloom.generations.policy import MOST_PARTS, Policy
from scrapy_bloom.settings import BloomSettings
from scrapy_bloom.text import counted, number_text, size_text

SCRAPY_SET_BYTES = 91  # per request, as docs/benchmarks.md has measured
_BEARABLE_DROPS = 0.1  # pages: nine crawls of ten lose none
_DEFAULT_RATE = BloomSettings.error_rate

_COLUMNS = (
    ("requests", "requests", number_text),
    ("error rate", "error_rate", "{:g}".format),
    ("size", "bytes", size_text),
    ("false positives", "expected_false_positives", number_text),
    ("bits/request", "bits_per_request", "{:.1f}".format),
    ("hashes", "hashes", str),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the subcommand."""
    parser.add_argument(
        "figures",
        nargs="*",
        type=requests_or_rate,
        metavar="N|P",
        help="numbers of requests and error rates",
    )
    add_json(parser)


def run(options: argparse.Namespace, settings: Settings) -> None:
    """Print a row for each number of requests at each error rate."""
    bloom = BloomSettings.from_settings(settings)
    counts = [figure for figure in options.figures if isinstance(figure, int)]
    rates = [figure for figure in options.figures if isinstance(figure, float)]
    policies = [
        Policy(expected=count, error_rate=rate)
        for count in counts or [bloom.expected_requests]
        for rate in rates or [bloom.error_rate]
    ]
    plans = [_plan(policy) | {"advice": _advice(policy)} for policy in policies]
    if options.json:
        print_json(plans)
        return
    if window := bloom.window_secs:
        windowed = [replace(policy, window=window) for policy in policies]
        sizes = [
            each.first().geometry.nbytes + (MOST_PARTS - 1) * each.after_turn([]).geometry.nbytes
            for each in windowed
        ]
        note(
            "scrapy bloom: the figures are without BLOOM_WINDOW_SECS; with it, a filter has up to "
            f"{MOST_PARTS} parts, here together about " + ", ".join(map(size_text, sizes))
        )
    print_table(_COLUMNS, plans)
    for line in dict.fromkeys(_advice_line(plan["advice"]) for plan in plans if plan["advice"]):
        say(line)


def _plan(policy: Policy) -> dict[str, Any]:
    """Return the size of a filter, and how many pages it is expected to lose."""
    num_blocks, num_hashes = geometry = policy.first().geometry
    return {
        "requests": policy.expected,
        "error_rate": policy.error_rate,
        "bytes": geometry.nbytes,
        "expected_false_positives": expected_false_positives(
            num_blocks, num_hashes, policy.expected
        ),
        "hashes": num_hashes,
        "bits": geometry.num_bits,
        "bits_per_request": geometry.num_bits / policy.expected,
    }


def _advice(policy: Policy) -> dict[str, Any] | None:
    """Return the figures at a better error rate; None if no page is expected to be lost."""
    plan = _plan(policy)
    rate = min(policy.error_rate, 10 * _DEFAULT_RATE)
    while plan["expected_false_positives"] > _BEARABLE_DROPS and rate >= 10 * MIN_ERROR_RATE:
        rate = float(f"{rate / 10:.0e}")
        plan = _plan(replace(policy, error_rate=rate))
    return plan if plan["error_rate"] < policy.error_rate else None


def _advice_line(advice: dict[str, Any]) -> str:
    drops = number_text(advice["expected_false_positives"], 1)
    return (
        f"Better for {counted(advice['requests'], 'request')}: {advice['error_rate']:g}, which "
        f"loses {drops} pages, in {size_text(advice['bytes'])}"
    )
