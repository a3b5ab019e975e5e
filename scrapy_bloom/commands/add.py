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
from collections import Counter
from collections.abc import Iterator
from typing import Any

from scrapy.exceptions import UsageError
from scrapy.settings import Settings

from scrapy_bloom.commands.shared.adding import Adder
from scrapy_bloom.commands.shared.arguments import add_json, add_place, add_requests
from scrapy_bloom.commands.shared.lists import Fields, RequestList
from scrapy_bloom.commands.shared.output import note, print_json, say
from scrapy_bloom.commands.shared.places import Place, opened_place
from scrapy_bloom.commands.shared.project import Project, load_project, made_request
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
    is_in_redis = options.place.url is not None
    with opened_place(options.place, project, is_new=is_in_redis) as place:
        made = _Made(options, project, place)
        requests = RequestList(options.rest, made, options.field)
        with place.adding(project) as adder:
            counts = _add(adder, requests.batches())
    counts["skipped"] = requests.skipped
    if options.json:
        read = counts["new"] + counts["duplicate"]
        print_json({"read": read, **counts, "handed_over": adder.hands_over})
    else:
        say(f"{counted(counts['new'], 'request was', 'requests were')} {adder.fate}")
        if number := counts["duplicate"]:
            say(f"Duplicates, left out: {number:,}")
    for name in sorted(made.unchecked):
        note(
            f"scrapy bloom: warning: nobody has checked that the spider has the method {name!r}: "
            "give --spider, in the project of the spider"
        )
    requests.check_skipped()


def _add(adder: Adder, requests: Iterator[list[dict[str, Any]]]) -> Counter[str]:
    """Add requests; return how many of them are new and duplicates."""
    counts = Counter(new=0, duplicate=0)
    try:
        for batch in requests:
            number = adder.add(batch)
            counts["new"] += number
            counts["duplicate"] += len(batch) - number
    except StorageError as error:
        if not counts["new"]:
            raise
        added = counted(counts["new"], "request was", "requests were")
        raise BloomError(
            f"{error} ({added} added before that; repeat the command to continue)"
        ) from error
    return counts


class _Made:
    """Makes the requests of a list.

    Attributes:
        unchecked: the names of callbacks, if the spider is not known.
    """

    def __init__(self, options: argparse.Namespace, project: Project, place: Place) -> None:
        queue = place.find_queue()
        spider: Any = project.find_spider(queue.progress().spider if queue else "")
        self._spider = spider
        self._project = project
        self._callback = options.callback
        self._defaults = {"priority": options.priority, "dont_filter": options.dont_filter}
        self.unchecked: set[str] = set()
        if self._lacks(options.callback):
            raise UsageError(
                f"--callback {options.callback}: the spider {self._spider.name!r} has no such "
                "method"
            )

    def _lacks(self, callback: str | None) -> bool:
        if callback is not None and self._spider is None:
            self.unchecked.add(callback)
        if callback is None or self._spider is None:
            return False
        return not callable(getattr(self._spider, callback, None))

    def __call__(self, url: str, fields: Fields) -> dict[str, Any]:
        """Return the request of a line; raise a ValueError if it is not valid."""
        callback = fields.get("callback", self._callback)
        if self._lacks(callback):
            raise ValueError(f"the spider has no method {callback!r}")
        request = made_request(url, {**self._defaults, **fields})
        self._project.fingerprint(request)  # a fingerprinter that fails is reported with the line
        return {**request.to_dict(), "callback": callback}
