"""Add the arguments that several subcommands have."""

import argparse

PLACE = "JOBDIR|REDIS-URL#KEY"
PROJECTS_SERVER = "redis"  # in place of a URL


def add_place(parser: argparse.ArgumentParser, *, is_optional: bool = False) -> None:
    """Add the place of a filter, and the spider for which it is."""
    default = " (default: that of the project's settings)" if is_optional else ""
    parser.add_argument(
        "place",
        metavar=PLACE,
        nargs="?" if is_optional else None,
        help=f"a JOBDIR; or a server and the name of a filter there{default}. The word redis in "
        "place of a URL is the server of the project's settings. Without a password, "
        "REDISCLI_AUTH is used",
    )
    add_spider(parser)


def add_spider(parser: argparse.ArgumentParser) -> None:
    """Add the option that names the spider of a filter."""
    parser.add_argument(
        "--spider",
        metavar="NAME",
        help="whose custom_settings count, and whose name is put into BLOOM_REDIS_KEY if there is "
        "no #KEY",
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
