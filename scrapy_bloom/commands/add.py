"""Add requests to a running or paused crawl with CrashSafeScheduler.

The URLs are arguments, or lines of a list (--file). Duplicates are counted and left out, unless
--dont-filter is given. Workers that share the queue in Redis crawl the requests at once. The crawl
of a JOBDIR queues them within a second, or when it is resumed.

With --from-scrapy-redis, the command adds the requests that a stopped crawl with scrapy-redis has
left on a server. It leaves their keys unchanged, unless --drain is given. It adds the queued
requests even if the filter has recorded them, so run it once, or with --drain.

Examples:
  scrapy bloom add jobs/news https://news.example/today --callback parse_article
  scrapy bloom add redis://localhost:6379/0#shop:bloom --file urls.txt
"""

import argparse
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, closing

from scrapy import Request, Spider
from scrapy.exceptions import UsageError
from scrapy.settings import Settings

from scrapy_bloom.commands.shared.adding import Adder, New
from scrapy_bloom.commands.shared.arguments import add_field, add_json, add_place, server_url
from scrapy_bloom.commands.shared.lists import UrlList, checked_urls
from scrapy_bloom.commands.shared.output import print_json, say
from scrapy_bloom.commands.shared.places import opened_place
from scrapy_bloom.commands.shared.project import (
    Project,
    answering_server,
    load_project,
    url_list,
)
from scrapy_bloom.commands.shared.scrapy_redis import RedisKey
from scrapy_bloom.exceptions import BloomError, StorageError
from scrapy_bloom.redis.connection.server import RedisServer
from scrapy_bloom.text import counted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the subcommand."""
    add_place(parser)
    parser.add_argument("rest", metavar="URL", nargs="*", help="a page to crawl")
    parser.add_argument("--file", metavar="URLFILE", help='a list of URLs; "-": the standard input')
    add_field(parser)
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
    parser.add_argument(
        "--drain",
        action="store_true",
        help="remove the added requests from the keys of scrapy-redis",
    )
    add_json(parser)


def run(options: argparse.Namespace, settings: Settings) -> None:
    """Add requests."""
    is_moving = _is_from_scrapy_redis(options)
    project = load_project(settings, options.spider, options.place.url)
    _check_callback(options, project)
    urls = url_list(options.file, project, options) if options.file is not None else None
    keys: list[RedisKey] = []
    with ExitStack() as stack:
        place = stack.enter_context(opened_place(options.place, project))
        adding: AbstractContextManager[Adder] = place.adding(project, may_begin=is_moving)
        adder = stack.enter_context(adding)
        if is_moving:
            source = load_project(settings, options.spider, options.from_scrapy_redis)
            server = stack.enter_context(closing(answering_server(source)))
            keys = _scrapy_redis_keys(project, options, adder.spider, server)
        counts = _add(adder, _moved(keys) if is_moving else _requests(options, urls, project))
    counts["skipped"] = urls.skipped if urls else sum(key.skipped for key in keys)
    if options.json:
        read = counts["new"] + counts["duplicate"]
        print_json({"read": read, **counts, "handed_over": adder.hands_over})
    else:
        say(f"{counted(counts['new'], 'request was', 'requests were')} {adder.fate}")
        if number := counts["duplicate"]:
            say(f"Duplicates, left out: {number:,}")
    if urls:
        urls.check_skipped()
    if skipped := [key.first_skipped for key in keys if key.skipped]:
        raise BloomError(
            f"{counted(counts['skipped'], 'entry', 'entries')} of scrapy-redis could not be read, "
            f"and stayed there; the first: {skipped[0]}"
        )


def _is_from_scrapy_redis(options: argparse.Namespace) -> bool:
    """Return whether requests of scrapy-redis are added; check that the options fit together."""
    is_moving = options.from_scrapy_redis is not None
    if is_moving == bool(options.rest or options.file is not None):
        raise UsageError(
            "name the requests in one way: give URLs, a list of them with --file, or "
            "--from-scrapy-redis"
        )
    if options.drain and not is_moving:
        raise UsageError("--drain is for --from-scrapy-redis")
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


def _check_callback(options: argparse.Namespace, project: Project) -> None:
    spider = project.crawler.spidercls
    if options.callback is None or spider is Spider:
        return
    if not callable(getattr(spider, options.callback, None)):
        raise BloomError(
            f"--callback {options.callback}: the spider {options.spider!r} has no such method"
        )


def _requests(
    options: argparse.Namespace, urls: UrlList | None, project: Project
) -> Iterator[list[New]]:
    def made(url: str) -> New:
        request = Request(url, priority=options.priority, dont_filter=options.dont_filter)
        return New({**request.to_dict(), "callback": options.callback})

    if options.rest:
        yield [made(url) for url, _ in checked_urls(options.rest, project.url_fingerprint)]
    for batch in urls.batches() if urls else ():
        yield [made(url.decode()) for url, _ in batch]


def _scrapy_redis_keys(
    project: Project, options: argparse.Namespace, spider: str, server: RedisServer
) -> list[RedisKey]:
    """Return the keys of scrapy-redis, by the names that its settings have."""
    settings = project.crawler.settings
    queue = settings.get("SCHEDULER_QUEUE_KEY") or "%(spider)s:requests"
    starts = getattr(project.crawler.spidercls, "redis_key", None)
    starts = starts or settings.get("REDIS_START_URLS_KEY") or "%(name)s:start_urls"
    keys = [
        RedisKey(server, queue % {"spider": spider}, is_queue=True, drains=options.drain),
        RedisKey(server, starts % {"name": spider}, is_queue=False, drains=options.drain),
    ]
    if not any(server.batches([("EXISTS", each.key) for each in keys])):
        raise StorageError(
            f"{server.address} has neither the queue {keys[0].key!r} nor the start URLs "
            f"{keys[1].key!r} of scrapy-redis; set SCHEDULER_QUEUE_KEY or REDIS_START_URLS_KEY, if "
            "they have other names"
        )
    return keys


def _moved(keys: list[RedisKey]) -> Iterator[list[New]]:
    # The filter may have recorded the queued requests, if scrapy-redis's set was imported.
    for key in keys:
        for page in key.pages():
            yield [New(each, is_filtered=not key.is_queue) for each in page]
