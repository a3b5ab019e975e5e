"""Filters that a command line names: in files, or in Redis."""

import argparse
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

from scrapy.exceptions import UsageError
from scrapy.settings import SETTINGS_PRIORITIES, Settings

from scrapy_bloom.commands.shared.arguments import is_redis
from scrapy_bloom.commands.shared.project import Project, load_project
from scrapy_bloom.crawl.backends import redis_server
from scrapy_bloom.exceptions import FingerprinterMismatchError
from scrapy_bloom.files.reader import FilterReader
from scrapy_bloom.redis.connection.server import RedisServer
from scrapy_bloom.redis.keys.store import RedisStore
from scrapy_bloom.redis.reader import RedisReader

Reader = FilterReader | RedisReader

_DEADLINE = "BLOOM_REDIS_DEADLINE_SECS"
_FIRST_ANSWER_SECS = 1.5  # somebody waits for it, and has perhaps mistyped the URL


def connect(options: argparse.Namespace, project: Project, *, made_for: str = "") -> RedisStore:
    """Return where a filter is in Redis, once the server has answered.

    The project is loaded with its URL; `made_for` is the spider's name if --spider says none.
    """
    key, name = options.key, options.spider or made_for
    if key is not None and ("{" in key or "}" in key):
        raise UsageError(f"--key is {key!r}; allowed is a name without braces")
    if key is None:
        if "%(spider)s" in project.bloom.redis_key and not name:
            raise UsageError(
                f"which filter? Say it with --key, or the spider with --spider (BLOOM_REDIS_KEY is "
                f"{project.bloom.redis_key!r})"
            )
        key = project.bloom.redis_key % {"spider": name}
    return RedisStore(answering_server(project), key)


def answering_server(project: Project) -> RedisServer:
    """Return the server of a project that was loaded with its URL, once it has answered.

    The wait is short, unless the command line says BLOOM_REDIS_DEADLINE_SECS.
    """
    bloom, secs = project.bloom, project.bloom.redis_deadline_secs
    if project.settings.getpriority(_DEADLINE) != SETTINGS_PRIORITIES["cmdline"]:
        secs = min(secs, _FIRST_ANSWER_SECS)
    with closing(redis_server(replace(bloom, redis_deadline_secs=secs))) as first:
        first.now()
    return redis_server(bloom)


@contextmanager
def opened_filter(
    options: argparse.Namespace, settings: Settings, project: Project | None = None
) -> Iterator[Reader]:
    """Open a filter, wherever it is, to be looked at: see `FilterReader` and `RedisReader`.

    The project is that of its crawls, loaded with the place, if the command needs it anyway.
    """
    window = project.bloom.window_secs if project else 0.0
    if not is_redis(options.place):
        with closing(FilterReader(Path(options.place), window=window)) as reader:
            yield reader
        return
    store = connect(options, project or load_project(settings, options.spider, options.place))
    with closing(store.server):
        yield RedisReader(store.server, store.key, window=window)


@contextmanager
def opened_for_crawl(options: argparse.Namespace, project: Project) -> Iterator[Reader]:
    """Open a filter to see what a crawl of the project would find in it; see `opened_filter`."""
    with opened_filter(options, project.settings, project) as reader:
        if reader.fingerprinter != project.fingerprinter:
            raise FingerprinterMismatchError(
                "the filter was recorded with REQUEST_FINGERPRINTER_CLASS = "
                f"{reader.fingerprinter!r}, and this project has {project.fingerprinter!r}, which "
                "would find nothing in it; run the command in the filter's project, or with "
                f"-s REQUEST_FINGERPRINTER_CLASS={reader.fingerprinter}"
            )
        yield reader


def state_text(is_closed: bool | None, is_in_use: bool | None) -> str:  # noqa: FBT001 - as readers have it
    """Return whether a crawl uses a filter, for people; one in Redis is neither closed nor not."""
    if is_in_use:
        return "in use by a running crawl"
    if is_closed is None:
        return "shared"
    if is_closed:
        return "closed"
    if is_in_use is None:
        return "not closed: in use, or its crawl was killed"
    return "not closed: its crawl was killed, or runs on another machine or in another container"
