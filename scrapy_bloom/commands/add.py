"""Add requests to a running or paused crawl with CrashSafeScheduler.

Give URLs, or lists of them. A list has on each line a URL, or a JSON object, with the URL in the
field that --field names, and perhaps with method, body, headers, meta, cb_kwargs, priority,
callback and dont_filter; the options are for lines without these. Duplicates are counted and left
out, unless --dont-filter is given. Workers that share the queue in Redis crawl the requests at
once. The crawl of a JOBDIR queues them within a second, or when it is resumed.

With --from-scrapy-redis, the command adds the requests that a stopped crawl with scrapy-redis has
left on a server, with the objects in their meta. It leaves their keys unchanged. It adds the queued
requests even if the filter has recorded them, so run it once.

Examples:
  scrapy bloom add jobs/news https://news.example/today --callback parse_article
  scrapy bloom add redis://localhost:6379/0#shop:bloom urls.txt
"""

import argparse
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, closing
from itertools import chain
from typing import Any

from scrapy.exceptions import UsageError
from scrapy.settings import Settings

from scrapy_bloom.commands.shared.adding import Adder
from scrapy_bloom.commands.shared.arguments import add_json, add_place, add_requests, server_url
from scrapy_bloom.commands.shared.lists import Fields, RequestList
from scrapy_bloom.commands.shared.output import note, print_json, say
from scrapy_bloom.commands.shared.places import Place, opened_place
from scrapy_bloom.commands.shared.project import (
    Project,
    answering_server,
    load_project,
    made_request,
)
from scrapy_bloom.commands.shared.scrapy_redis import New, RedisKey
from scrapy_bloom.exceptions import BloomError, StorageError
from scrapy_bloom.redis.connection.server import RedisServer
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
    parser.add_argument(
        "--from-scrapy-redis",
        type=server_url,
        metavar="REDIS-URL",
        help="add the requests that a crawl with scrapy-redis has left on this server",
    )
    add_json(parser)


def run(options: argparse.Namespace, settings: Settings) -> None:
    """Add requests."""
    is_moving = _is_from_scrapy_redis(options)
    project = load_project(settings, options.spider, options.place.url)
    keys: list[RedisKey] = []
    with ExitStack() as stack:
        place = stack.enter_context(opened_place(options.place, project, is_new=is_moving))
        made = _Made(options, project, place)
        requests = RequestList(options.rest, made, options.field)
        adding: AbstractContextManager[Adder] = place.adding(project, may_begin=is_moving)
        adder = stack.enter_context(adding)
        if is_moving:
            source = load_project(settings, options.spider, options.from_scrapy_redis)
            server = stack.enter_context(closing(answering_server(source)))
            keys = _scrapy_redis_keys(project, adder.spider, server)
        moved = chain.from_iterable(key.pages() for key in keys)
        counts = _add(adder, moved if is_moving else requests.batches())
    counts["skipped"] = requests.skipped + sum(key.skipped for key in keys)
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
    if skipped := [key.first_skipped for key in keys if key.skipped]:
        raise BloomError(
            f"{counted(counts['skipped'], 'entry', 'entries')} of scrapy-redis could not be read; "
            f"the first: {skipped[0]}. If you import the set of fingerprints "
            "now, those pages are never crawled"
        )


def _is_from_scrapy_redis(options: argparse.Namespace) -> bool:
    """Return whether requests of scrapy-redis are added; check that the options fit together."""
    is_moving = options.from_scrapy_redis is not None
    if is_moving == bool(options.rest):
        raise UsageError(
            "name the requests in one way: give URLs or lists of them, or --from-scrapy-redis"
        )
    if is_moving and options.place.url is None:
        raise UsageError("--from-scrapy-redis adds to a queue in Redis: give its URL")
    return is_moving


def _add(adder: Adder, requests: Iterator[list[New]]) -> Counter[str]:
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

    def __call__(self, url: str, fields: Fields) -> New:
        """Return the request of a line; raise a ValueError if it is not valid."""
        callback = fields.get("callback", self._callback)
        if self._lacks(callback):
            raise ValueError(f"the spider has no method {callback!r}")
        request = made_request(url, {**self._defaults, **fields})
        self._project.fingerprint(request)  # a fingerprinter that fails is reported with the line
        return New({**request.to_dict(), "callback": callback})


def _scrapy_redis_keys(project: Project, spider: str, server: RedisServer) -> list[RedisKey]:
    """Return the keys of scrapy-redis, by the names that its settings have."""
    settings = project.crawler.settings
    queue = settings.get("SCHEDULER_QUEUE_KEY") or "%(spider)s:requests"
    starts = getattr(project.crawler.spidercls, "redis_key", None)
    starts = starts or settings.get("REDIS_START_URLS_KEY") or "%(name)s:start_urls"
    keys = [
        RedisKey(server, queue % {"spider": spider}, is_queue=True),
        RedisKey(server, starts % {"name": spider}, is_queue=False),
    ]
    if not any(server.batches([("EXISTS", each.key) for each in keys])):
        raise StorageError(
            f"{server.address} has neither the queue {keys[0].key!r} nor the start URLs "
            f"{keys[1].key!r} of scrapy-redis; set SCHEDULER_QUEUE_KEY or REDIS_START_URLS_KEY, if "
            "they have other names"
        )
    return keys
