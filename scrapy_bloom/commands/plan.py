"""How large a filter will be, and what it is expected to cost.

Numbers of requests (10k, 5M, 1e9, 1_000_000) and error rates (1e-6, 0.1%) in any order; several
of them make a table. What is left out comes from BLOOM_EXPECTED_REQUESTS and BLOOM_ERROR_RATE.

"False drops" are pages that the whole crawl is expected to lose, since a filter takes them for
seen. While BLOOM_ON_FULL is "grow", the first file is made for half of the error rate, so that the
rate holds however far the crawl goes.

Examples:
  scrapy bloom plan 100M 1e-6
  scrapy bloom plan 1M 10M 100M 1e-4 1e-6 --vs
  scrapy bloom plan 5M 1e-6 --json
"""

import argparse
from dataclasses import replace
from typing import Any

from scrapy.settings import Settings

from scrapy_bloom.alternatives import alternatives
from scrapy_bloom.commands.arguments import requests_or_rate
from scrapy_bloom.commands.output import add_json, note, number, print_json, print_table
from scrapy_bloom.generations import LIVE_QUARTERS, Policy
from scrapy_bloom.settings import BloomSettings
from scrapy_bloom.sizing import expected_false_drops
from scrapy_bloom.status import size_text

SYNTAX = "[N ...] [P ...] [--vs] [--json]"
HELP = "how large a filter will be, for n requests at error rate p"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's own."""
    parser.add_argument(
        "figures",
        nargs="*",
        type=requests_or_rate,
        metavar="N|P",
        help="numbers of requests and error rates",
    )
    parser.add_argument(
        "--vs", action="store_true", help="beside it, what else would take, or get wrong"
    )
    add_json(parser)


def run(options: argparse.Namespace, settings: Settings) -> None:
    """Print a row for each number of requests at each error rate."""
    bloom = BloomSettings.from_settings(settings)
    counts = [each for each in options.figures if isinstance(each, int)]
    rates = [each for each in options.figures if isinstance(each, float)]
    policies = [
        Policy(expected=count, error_rate=rate, on_full=bloom.on_full)
        for count in counts or [bloom.expected_requests]
        for rate in rates or [bloom.error_rate]
    ]
    plans = [_plan(policy) for policy in policies]
    if options.json:
        for plan in plans if not options.vs else []:
            del plan["instead"]
        print_json(plans)
        return
    if window := bloom.window_secs:
        parts = [replace(policy, window=window).first().geometry.nbytes for policy in policies]
        note(
            "scrapy bloom: the figures are without BLOOM_WINDOW_SECS; with it, a filter has up to "
            f"{LIVE_QUARTERS} parts, here at most "
            + ", ".join(size_text(LIVE_QUARTERS * nbytes) for nbytes in parts)
        )
    print_table(
        ["requests", "error rate", "size", "bits", "hashes", "bits/request", "false drops"],
        [_row(plan) for plan in plans],
    )
    if options.vs:
        print_table(
            ["requests", "error rate", "instead:", "size", "times ours", "false drops"],
            [row for plan in plans for row in _rows_of_others(plan)],
            title="\nWhat else would take, or get wrong",
        )


def _plan(policy: Policy) -> dict[str, Any]:
    geometry, requests = policy.first().geometry, policy.expected
    return {
        "requests": requests,
        "error_rate": policy.error_rate,
        "bytes": geometry.nbytes,
        "bits": geometry.nbytes * 8,
        "hashes": geometry.num_hashes,
        "bits_per_request": geometry.nbytes * 8 / requests,
        "expected_false_drops": expected_false_drops(
            geometry.num_blocks, geometry.num_hashes, requests
        ),
        "instead": [
            {
                "name": each.name,
                "bytes": each.nbytes,
                "expected_false_drops": each.false_drops,
            }
            for each in alternatives(requests, geometry.nbytes)
        ],
    }


def _row(plan: dict[str, Any]) -> list[str]:
    return [
        number(plan["requests"]),
        f"{plan['error_rate']:g}",
        size_text(plan["bytes"]),
        number(plan["bits"]),
        str(plan["hashes"]),
        f"{plan['bits_per_request']:.1f}",
        number(plan["expected_false_drops"]),
    ]


def _rows_of_others(plan: dict[str, Any]) -> list[list[str]]:
    return [
        [
            number(plan["requests"]),
            f"{plan['error_rate']:g}",
            each["name"],
            size_text(each["bytes"]),
            f"{each['bytes'] / plan['bytes']:.1f}",
            number(each["expected_false_drops"]),
        ]
        for each in plan["instead"]
    ]
