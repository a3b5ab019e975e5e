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

from scrapy.settings import Settings

from scrapy_bloom.commands.shared.cli import add_shared, print_json, say
from scrapy_bloom.commands.shared.lists import Fields, RequestList
from scrapy_bloom.commands.shared.places import opened_place
from scrapy_bloom.commands.shared.project import Addition, made_request
from scrapy_bloom.text import counted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_shared(parser, "place", "--spider", "requests", "--field")
    parser.add_argument(
        "--callback", metavar="NAME", help="the spider's method for the responses (parse)"
    )
    parser.add_argument(
        "--priority", type=int, default=0, metavar="N", help="higher ones are crawled first (0)"
    )
    parser.add_argument("--dont-filter", action="store_true", help="add duplicates as well")
    add_shared(parser, "--json")


def run(options: argparse.Namespace, settings: Settings) -> None:
    defaults = {"priority": options.priority, "dont_filter": options.dont_filter}
    with opened_place(options, settings) as (place, project):

        def made(url: str, fields: Fields) -> Addition:
            request = made_request(url, {**defaults, **fields})
            callback = fields.get("callback", options.callback)
            project.check_callback(callback)
            values = {**request.to_dict(), "callback": callback}
            return Addition(request, values, project.fingerprint(request))

        requests = RequestList(options.requests, made, options.field)
        new = place.add(requests.batches(), project)
    duplicates = requests.read - new
    if options.json:
        figures = {"read": requests.read, "new": new, "duplicate": duplicates}
        print_json({**figures, "skipped": requests.skipped, "handed_over": place.hands_over})
    else:
        fate = f"handed over to {place.name}" if place.hands_over else "added to the queue"
        say(f"{counted(new, 'request was', 'requests were')} {fate}")
        if duplicates:
            say(f"Duplicates, left out: {duplicates:,}")
    requests.check_skipped()
