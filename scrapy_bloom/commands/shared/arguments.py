"""Add and convert the arguments that several subcommands have.

A converter raises argparse.ArgumentTypeError if a value is not valid. The parser masks passwords in
its message.
"""

import argparse
import math
import re
from pathlib import Path

from scrapy.exceptions import UsageError

from scrapy_bloom.filters.sizing import MAX_CAPACITY, MIN_ERROR_RATE
from scrapy_bloom.redis.connection.url import SCHEMES, looks_like_url
from scrapy_bloom.text import parsed_number

PROJECTS_SERVER = "redis"  # in place of a URL
_WITH_KEY = re.compile("([^#]+)#([^@]+)")  # an "@" would show that it is a part of a password
_HOST = re.compile(r"[\w.-]+:\d{1,5}(/\d+)?")  # of a URL without its scheme
_SCHEMES = tuple(f"{scheme}://" for scheme in SCHEMES)
_BEGINNINGS = f"{', '.join(_SCHEMES[:-1])} or {_SCHEMES[-1]}"
_REDIS = (
    "a URL as in BLOOM_REDIS_URL, or the word redis: the server of the project's settings. Without "
    "a password there, REDISCLI_AUTH is used"
)
_OF_PROJECT = (
    " (default: the server or JOBDIR of the project's settings, with --spider those of the spider)"
)


def requests(text: str) -> int:
    """Return a number of requests: 10k, 5M, 1e9, 1_000_000, 2.5B.

    >>> [requests(text) for text in ("10k", "2.5M", "1e9", "1_000_000", "1,000")]
    [10000, 2500000, 1000000000, 1000000, 1000]
    """
    value = parsed_number(text)
    if not math.isfinite(value) or value != int(value) or not 1 <= value <= MAX_CAPACITY:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of requests; use a whole number from 1 to "
            f"{MAX_CAPACITY:,}, for example 10k, 5M, 1e9 or 1_000_000"
        )
    return int(value)


def error_rate(text: str) -> float:
    """Return an error rate: 1e-6, 0.001, 0.1%.

    >>> error_rate("1e-6"), error_rate("0.1%")
    (1e-06, 0.001)
    """
    value = parsed_number(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    if not MIN_ERROR_RATE <= value < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not an error rate; use a number between 0 and 1 (at least "
            f"{MIN_ERROR_RATE}), for example 1e-6 or 0.1%"
        )
    return value


def requests_or_rate(text: str) -> int | float:
    """Return a number of requests (an int, at least 1) or an error rate (a float below 1)."""
    if text.endswith("%") or parsed_number(text) < 1:
        return error_rate(text)
    return requests(text)


def split_url(text: str) -> tuple[str | None, str | None]:
    """Return the URL and the key in REDIS-URL#KEY, in which the key is optional.

    Both are None for a path. Raises a UsageError for another URL, because a directory with its name
    would show the password.

    >>> split_url("redis://host/0#shop:bloom"), split_url("redis"), split_url("jobs/a#b")
    (('redis://host/0', 'shop:bloom'), ('redis', None), (None, None))
    """
    match = _WITH_KEY.fullmatch(text)
    if match and _is_server(match[1]):
        return match[1], match[2]
    if _is_server(text):
        return text, None
    if looks_like_url(text):
        if text.lower().startswith(("http:", "https:")):
            raise UsageError(
                f"{text} is the URL of a page, and that of a Redis server begins with redis://; "
                "give the filter first, and then URLs (import: a list of URLs, then the filter)"
            )
        raise UsageError(
            f"{text} is neither a path nor the URL of a Redis server, which begins with "
            f"{_BEGINNINGS}"
        )
    if _HOST.fullmatch(text.partition("#")[0]) and not Path(text).exists():
        raise UsageError(f"{text} is not a path; if it is a server, put redis:// in front of it")
    return None, None


def _is_server(place: str) -> bool:
    return place.partition("#")[0] == PROJECTS_SERVER or place.lower().startswith(_SCHEMES)


def add_place(parser: argparse.ArgumentParser, *, is_optional: bool = False) -> None:
    """Add the place of a filter: a JOBDIR, or in Redis.

    `BloomCommand.run` makes a `Place` of it; if it is missing, that of the project's crawl.
    """
    parser.add_argument(
        "place",
        metavar="JOBDIR|REDIS-URL[#KEY]",
        nargs="?" if is_optional else None,
        help=f"where the filter is{_OF_PROJECT if is_optional else ''}; {_REDIS}",
    )
    add_filter_name(parser)


def add_filter_name(parser: argparse.ArgumentParser) -> None:
    """Add the options that name a filter in Redis."""
    parser.add_argument(
        "--key",
        metavar="NAME",
        help="the filter's name in Redis, for example shop:bloom (default: BLOOM_REDIS_KEY with "
        "the name of the spider that --spider names)",
    )
    parser.add_argument(
        "--spider",
        metavar="NAME",
        help="the spider that the filter is for: its custom_settings count, and its name in "
        "BLOOM_REDIS_KEY",
    )


def add_requests(parser: argparse.ArgumentParser) -> None:
    """Add the requests of a subcommand: URLs, and lists of them."""
    parser.add_argument(
        "rest",
        metavar="URL|URLFILE",
        nargs="*",
        help='a URL, or a list of URLs or JSON objects; "-": the standard input',
    )
    add_field(parser)


def add_field(parser: argparse.ArgumentParser) -> None:
    """Add the option of subcommands that read a list of URLs."""
    parser.add_argument(
        "--field",
        default="url",
        metavar="NAME",
        help="the field with the URL, in a list of JSON objects (default: url)",
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add the option of subcommands that print figures."""
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def add_yes(parser: argparse.ArgumentParser) -> None:
    """Add the option of subcommands that ask before they change anything."""
    parser.add_argument("-y", "--yes", action="store_true", help="do not ask")
