"""Add requests to a running or paused crawl with CrashSafeScheduler.

Give URLs, or lists of them. A list has on each line a URL, or a JSON object, with the URL in the
field that --field names, and perhaps with method, body, headers, meta, cb_kwargs, priority,
callback and dont_filter; the options are for lines without these. Duplicates are counted and left
out, unless --dont-filter is given. Workers that share the queue in Redis crawl the requests at
once. The crawl of a JOBDIR queues them within a second, or when it is resumed.

In Redis, the command begins a queue if there is none, and --spider names its spider.

Examples:
  scrapy bloom add jobs/news https://news.example/today --callback parse_article
  scrapy bloom add redis://localhost:6379/0#shop:bloom urls.txt
"""

import argparse
from collections.abc import Generator
from contextlib import closing
from typing import Any

from scrapy.exceptions import UsageError
from scrapy.settings import Settings

from scrapy_bloom.commands.shared.arguments import add_json, add_place, add_requests
from scrapy_bloom.commands.shared.lists import Fields, RequestList
from scrapy_bloom.commands.shared.output import note, print_json, say
from scrapy_bloom.commands.shared.places import opened_place
from scrapy_bloom.commands.shared.project import load_project, made_request
from scrapy_bloom.exceptions import BloomError, StorageError
from scrapy_bloom.text import counted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the subcommand."""
    add_place(parser)
    add_requests(parser)
    parser.add_argument(
        "--callback", metavar="NAME", help="the spider's method for the responses (parse)"
    )
    parser.add_argument(
        "--priority", type=int, default=0, metavar="N", help="higher ones are crawled first (0)"
    )
    parser.add_argument("--dont-filter", action="store_true", help="add duplicates as well")
    add_json(parser)


def run(options: argparse.Namespace, settings: Settings) -> None:
    """Add requests."""
    if not options.rest:
        raise UsageError("there is nothing to add: give URLs, or a list of them")
    project = load_project(settings, options.spider, options.place.url)
    defaults = {"priority": options.priority, "dont_filter": options.dont_filter}
    unchecked = set[str]()  # names of callbacks, if the spider is not known
    is_in_redis = options.place.url is not None
    with opened_place(options.place, project, is_new=is_in_redis) as place:
        queue = place.find_queue()
        spider: Any = project.find_spider(queue.progress().spider if queue else "")

        def made(url: str, fields: Fields) -> dict[str, Any]:
            callback = fields.get("callback", options.callback)
            if spider is None and callback is not None:
                unchecked.add(callback)
            if _lacks(spider, callback):
                raise ValueError(f"the spider has no method {callback!r}")
            request = made_request(url, {**defaults, **fields})
            project.fingerprint(request)  # one that fails is reported with the line
            return {**request.to_dict(), "callback": callback}

        if _lacks(spider, options.callback):
            raise UsageError(
                f"--callback {options.callback}: the spider {spider.name!r} has no such method"
            )
        requests = RequestList(options.rest, made, options.field)
        new = _sum(place.add(requests.batches(), project))
        duplicates = requests.read - new
        if options.json:
            figures = {"read": requests.read, "new": new, "duplicate": duplicates}
            more = {"skipped": requests.skipped, "handed_over": place.hands_over}
            print_json({**figures, **more})
        else:
            fate = "added to the queue"
            if place.hands_over:
                fate = (
                    f"handed over to {place.name}: its crawl queues new requests within a second, "
                    "or when it is resumed"
                )
            say(f"{counted(new, 'request was', 'requests were')} {fate}")
            if duplicates:
                say(f"Duplicates, left out: {duplicates:,}")
    for name in sorted(unchecked):
        note(
            f"scrapy bloom: warning: nobody has checked that the spider has the method {name!r}: "
            "give --spider, in the project of the spider"
        )
    requests.check_skipped()


def _sum(added: Generator[int, None, None]) -> int:
    new = 0
    try:
        with closing(added):
            for number in added:
                new += number
    except StorageError as error:
        if not new:
            raise
        raise BloomError(
            f"{error} ({counted(new, 'request was', 'requests were')} added before that; repeat "
            "the command to continue)"
        ) from error
    return new


def _lacks(spider: Any, callback: str | None) -> bool:
    return spider and callback is not None and not callable(getattr(spider, callback, None))
