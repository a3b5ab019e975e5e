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
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, nullcontext, suppress
from pathlib import Path
from typing import Any

from scrapy import Request, Spider
from scrapy.exceptions import UsageError
from scrapy.settings import Settings
from scrapy.utils.httpobj import urlparse_cached

from scrapy_bloom.commands.shared.arguments import (
    add_field,
    add_json,
    add_place,
    is_redis,
    server_url,
)
from scrapy_bloom.commands.shared.lists import UrlList, checked_urls
from scrapy_bloom.commands.shared.output import print_json, say
from scrapy_bloom.commands.shared.project import (
    Project,
    answering_server,
    connect,
    load_project,
    opened_for_crawl,
    url_list,
)
from scrapy_bloom.commands.shared.scrapy_redis import RedisKey, request_of
from scrapy_bloom.crawl.scheduler.safe_queue import order_of, serves_least_busy_slot
from scrapy_bloom.exceptions import BloomError, StorageError
from scrapy_bloom.generations.policy import Origin
from scrapy_bloom.job import jobdir
from scrapy_bloom.queues.batch import Found, serialized
from scrapy_bloom.queues.collected import Collected
from scrapy_bloom.queues.job_state import MOST_IN_A_FILE, hand_over
from scrapy_bloom.queues.shared import RejoinedError, SharedStore
from scrapy_bloom.queues.shared_state import read_state
from scrapy_bloom.redis.backend import RedisBackend
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
    is_moving = options.from_scrapy_redis is not None
    if is_moving == bool(options.rest or options.file is not None):
        raise UsageError(
            "which requests? Give URLs, a list of them with --file, or --from-scrapy-redis"
        )
    if options.drain and not is_moving:
        raise UsageError("--drain is for --from-scrapy-redis")
    if is_moving and not is_redis(options.place):
        raise UsageError("--from-scrapy-redis adds to a queue in Redis: give its URL")
    project = load_project(settings, options.spider, options.place)
    _check_callback(options, project)
    urls = url_list(options.file, project, options) if options.file is not None else None
    counts = Counter(new=0, duplicate=0, skipped=0)
    if is_moving:
        source = load_project(settings, options.spider, options.from_scrapy_redis)
        with closing(answering_server(source)) as server:
            backend, spider = _target(project, options)
            keys = _scrapy_redis_keys(project, options, spider, server)
            _add_to_shared(project, backend, spider, _moved(keys), counts)
        skipped = [each.first_skipped for each in keys if each.skipped]
        counts["skipped"] = sum(each.skipped for each in keys)
    else:
        requests, skipped = _requests(options, urls, project), []
        if is_redis(options.place):
            _add_to_shared(project, *_target(project, options), requests, counts)
        else:
            _add_to_job(project, options, requests, counts)
        counts["skipped"] = urls.skipped if urls else 0
    _report(options, counts)
    if urls:
        urls.check_skipped()
    if skipped:
        raise BloomError(
            f"{counted(counts['skipped'], 'entry', 'entries')} of scrapy-redis could not be read, "
            f"and stayed there; the first: {skipped[0]}"
        )


def _check_callback(options: argparse.Namespace, project: Project) -> None:
    spider = project.crawler.spidercls
    if options.callback is None or spider is Spider:
        return
    if not callable(getattr(spider, options.callback, None)):
        raise BloomError(
            f"--callback {options.callback}: the spider {options.spider!r} has no such method"
        )


def _report(options: argparse.Namespace, counts: Counter[str]) -> None:
    is_local = not is_redis(options.place)
    if options.json:
        read = counts.total() - counts["skipped"]
        print_json({"read": read, **counts, "handed_over": is_local})
        return
    if is_local:
        say(
            f"{counted(counts['new'], 'request was', 'requests were')} handed over to the crawl of "
            f"{options.place}: it queues them within a second, or when it is resumed"
        )
    else:
        say(f"{counted(counts['new'], 'request was', 'requests were')} added to the queue")
    if number := counts["duplicate"]:
        say(f"Duplicates, left out: {number:,}")


# The requests, as `Request.to_dict` makes them, and whether they are filtered.
_Requests = Iterator[list[tuple[Mapping[str, Any], bool]]]


def _requests(options: argparse.Namespace, urls: UrlList | None, project: Project) -> _Requests:
    def made(url: str) -> tuple[Mapping[str, Any], bool]:
        request = Request(url, priority=options.priority, dont_filter=options.dont_filter)
        return {**request.to_dict(), "callback": options.callback}, True

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


def _moved(keys: list[RedisKey]) -> _Requests:
    # The filter may have recorded the queued requests, if scrapy-redis's set was imported.
    for key in keys:
        for page in key.pages():
            yield [(each, not key.is_queue) for each in page]


def _add_to_job(
    project: Project, options: argparse.Namespace, requests: _Requests, counts: Counter[str]
) -> None:
    """Hand over requests that the filter has not recorded; the crawl filters them once more."""
    job_dir = Path(options.place)
    if not jobdir.is_database(job_dir / jobdir.DATABASE):
        raise StorageError(f"{job_dir} holds no queue of CrashSafeScheduler; give its JOBDIR")
    # Otherwise, the filter is in a BLOOM_DIR.
    has_filter = bool(jobdir.filter_files(job_dir / "bloom"))
    with opened_for_crawl(options, project) if has_filter else nullcontext() as reader:
        for batch in requests:
            found = [request for request, _ in batch]
            if reader is not None and not options.dont_filter:
                seen = reader.are_seen([project.fingerprint(request_of(each)) for each in found])
                found = [each for each, is_seen in zip(found, seen, strict=True) if not is_seen]
            counts["duplicate"] += len(batch) - len(found)
            for start in range(0, len(found), MOST_IN_A_FILE):
                hand_over(job_dir, found[start : start + MOST_IN_A_FILE])
            counts["new"] += len(found)


def _target(project: Project, options: argparse.Namespace) -> tuple[RedisBackend, str]:
    """Return the filter of the queue that requests are added to, not opened, and its spider.

    The requests of scrapy-redis may begin a new queue, for the spider that --spider names. Raises a
    StorageError if there is no such queue.
    """
    server, key = connect(options, project)
    state, bloom = read_state(server, key), project.bloom
    spider = options.spider or (state.crawl if state else "")
    may_begin = options.from_scrapy_redis and spider
    if state is None and not may_begin:
        hint = "; give the spider of a new one with --spider" if options.from_scrapy_redis else ""
        raise StorageError(f"{server.address} has no queue {key!r}; no request was added{hint}")
    origin = Origin(salt=bloom.salt, fingerprinter=project.fingerprinter, spider=spider)
    return RedisBackend(server, key, bloom.policy, origin, mirror=False), spider


def _add_to_shared(
    project: Project, backend: RedisBackend, spider: str, requests: _Requests, counts: Counter[str]
) -> None:
    """Add requests to the queue in Redis, as a worker that takes none."""
    order, by_slot = order_of(project.crawler), serves_least_busy_slot(project.crawler)
    with ExitStack() as stack:
        stack.callback(_end, backend.close)
        backend.open()
        store = SharedStore(
            backend.filter,
            spider,
            by_slot=by_slot,
            lease_secs=project.bloom.queue_lease_secs,
        )
        store.join()
        stack.callback(_end, store.leave)
        try:
            for batch in requests:
                collected = Collected()
                for request, is_filtered in batch:
                    found = _found(request, project, order, by_slot=by_slot, filters=is_filtered)
                    collected.add_found(found)
                while collected:
                    changes = collected.next_batch()
                    try:
                        reply = store.apply(changes)
                    except RejoinedError as error:
                        # The lease expired while a pipe gave nothing, or the server was rolled
                        # back. What it has lost is counted already.
                        again = Collected()
                        for found in error.lost:
                            again.add_found(found)
                        while again:
                            store.apply(again.next_batch())
                        reply = store.apply(changes)
                    backend.filter.keep_up()
                    counts["new"] += sum(reply.queued)
                    counts["duplicate"] += reply.queued.count(False)
        except StorageError as error:
            added = counted(counts["new"], "request was", "requests were")
            raise BloomError(
                f"{error} ({added} added before that; repeat the command to continue)"
            ) from error


def _end(function: Callable[[], None]) -> None:
    with suppress(StorageError):  # the lease of this worker expires by itself
        function()


def _found(
    request: Mapping[str, Any], project: Project, order: Any, *, by_slot: bool, filters: bool
) -> Found:
    """Return what the queue has of a request."""
    plain = request_of(request)
    rank, newest_first = order(plain)
    slot = plain.meta.get("download_slot") or urlparse_cached(plain).hostname or ""
    has_fingerprint = not filters or not request.get("dont_filter")
    return Found(
        serialized(request),
        project.fingerprint(plain) if has_fingerprint else None,
        slot=str(slot) if by_slot else "",
        priority=plain.priority,
        rank=rank,
        newest_first=newest_first,
        is_filtered=filters,
        has_parent=False,
    )
