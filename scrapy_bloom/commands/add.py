"""Add requests to a running or paused crawl with CrashSafeScheduler.

Give URLs, or lists of them ("-": the standard input). Each line of a list is
a URL, or a JSON object with one and perhaps with method, body, headers, meta,
cb_kwargs, priority, callback and dont_filter; the options are for lines
without these. Workers that share the queue in Redis crawl the requests at
once. The crawl of a JOBDIR queues them within a second, or when it is resumed.
In Redis, --spider begins a queue for that spider if there is none.

Examples:
  scrapy bloom add jobs/news https://news.example/today --callback parse_article
  scrapy bloom add redis://localhost:6379/0#shop:bloom urls.txt
"""

import argparse
from contextlib import closing
from typing import Any

from scrapy.exceptions import UsageError
from scrapy.settings import Settings

from scrapy_bloom.commands.shared.arguments import add_json, add_place, add_requests
from scrapy_bloom.commands.shared.lists import Fields, RequestList
from scrapy_bloom.commands.shared.opening import opened_place
from scrapy_bloom.commands.shared.output import print_json, say
from scrapy_bloom.commands.shared.project import made_request
from scrapy_bloom.text import counted


def add_arguments(parser: argparse.ArgumentParser) -> None:
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
    if not options.rest:
        raise UsageError("there is nothing to add: give URLs, or a list of them")
    defaults = {"priority": options.priority, "dont_filter": options.dont_filter}
    with opened_place(options, settings, is_new=True) as (place, project):

        def made(url: str, fields: Fields) -> dict[str, Any]:
            callback = fields.get("callback", options.callback)
            if not project.has_callback(callback):
                raise ValueError(f"the spider has no method {callback!r}")
            request = made_request(url, {**defaults, **fields})
            project.fingerprint(request)  # one that fails is reported with the line
            return {**request.to_dict(), "callback": callback}

        if not project.has_callback(options.callback):
            raise UsageError(
                f"--callback {options.callback}: the spider {options.spider!r} has no such method"
            )
        requests = RequestList(options.rest, made, options.field)
        with closing(place.add(requests.batches(), project)) as added:
            new = sum(added)
    duplicates = requests.read - new
    if options.json:
        figures = {"read": requests.read, "new": new, "duplicate": duplicates}
        more = {"skipped": requests.skipped, "handed_over": place.hands_over}
        print_json({**figures, **more})
    else:
        fate = "added to the queue"
        if place.hands_over:
            fate = (
                f"handed over to {place.name}: its crawl queues new requests within a second, or "
                "when it is resumed"
            )
        say(f"{counted(new, 'request was', 'requests were')} {fate}")
        if duplicates:
            say(f"Duplicates, left out: {duplicates:,}")
    requests.check_skipped()
