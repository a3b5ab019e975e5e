"""The project and the place of a command line: settings, spider, filter, queue, URLs."""

import argparse
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scrapy import Request, Spider
from scrapy.crawler import Crawler
from scrapy.exceptions import UsageError
from scrapy.settings import SETTINGS_PRIORITIES, Settings
from scrapy.utils.misc import build_from_crawler, load_object
from scrapy.utils.python import global_object_name

from scrapy_bloom.commands.shared.arguments import PROJECTS_SERVER, is_redis
from scrapy_bloom.commands.shared.lists import UrlList
from scrapy_bloom.crawl.fingerprinting import (
    Fingerprint,
    fingerprint_function,
    plain_fingerprint,
)
from scrapy_bloom.exceptions import BloomError, FingerprinterMismatchError
from scrapy_bloom.files.directory import FilterReader
from scrapy_bloom.job import jobdir
from scrapy_bloom.queues.job_state import read_recent
from scrapy_bloom.redis.connection.server import RedisServer
from scrapy_bloom.redis.stored import RedisPlace, RedisReader
from scrapy_bloom.settings import BloomSettings, url_with_login

FINGERPRINTER = "REQUEST_FINGERPRINTER_CLASS"

Place = Path | RedisPlace  # of a filter and its queue
Reader = FilterReader | RedisReader

_FIRST_ANSWER_SECS = 1.5  # short, because the URL may be mistyped


@dataclass(frozen=True)
class Project:
    """The settings and the fingerprinter of a crawl of the project."""

    crawler: Crawler  # not started
    bloom: BloomSettings
    fingerprint: Fingerprint
    fingerprinter: str  # its import path
    is_scrapys: bool  # `plain_fingerprint` makes the same fingerprints

    def url_fingerprint(self, url: str) -> bytes:
        """Return the fingerprint of a GET request; raise a ValueError if the URL is not valid."""
        plain = plain_fingerprint(url) if self.is_scrapys else None
        return plain or self.fingerprint(Request(url))


def load_project(
    settings: Settings, spider: str | None = None, place: str = "", **more: Any
) -> Project:
    """Return the settings and the fingerprinter of a crawl with these settings.

    Args:
        settings: as the command got them.
        spider: the spider's name; in a project it must be one of its spiders.
        place: of a filter; if it is the URL of a server, the crawl uses that server, with the login
            from the settings or REDISCLI_AUTH.
        more: settings that the command sets itself.
    """
    in_redis = is_redis(place)
    try:
        crawler = Crawler(_spider_class(settings, spider), settings)
        # Some fingerprinters use the stats.
        crawler.stats = load_object(crawler.settings["STATS_CLASS"])(crawler)
        params: Mapping[str, Any] | None = None
        if in_redis and place != PROJECTS_SERVER:
            more["BLOOM_REDIS_URL"], params = url_with_login(place, crawler.settings)
        # No command crawls anything, so it records at once.
        if only_crawled := crawler.settings.get("BLOOM_RECORD_ON") == "crawled":
            more["BLOOM_RECORD_ON"] = "scheduled"
        crawler.settings.setdict(more, priority=max(SETTINGS_PRIORITIES.values()))
        crawler.addons.load_settings(crawler.settings)
        bloom = BloomSettings.from_settings(crawler.settings, scrapy_redis=in_redis)
        fingerprinter = build_from_crawler(load_object(crawler.settings[FINGERPRINTER]), crawler)
    except BloomError:
        raise
    except Exception as error:
        raise BloomError(
            "the project's spider, add-ons or request fingerprinter cannot be created: "
            f"{type(error).__name__}: {error}"
        ) from error
    fingerprint = fingerprint_function(fingerprinter)
    if params is not None:
        bloom = replace(bloom, redis_params=params)
    if in_redis and (password := os.environ.get("REDISCLI_AUTH")):
        bloom = replace(bloom, redis_params={"password": password, **bloom.redis_params})
    if only_crawled:  # the filter in memory has the other half
        bloom = replace(bloom, error_rate=bloom.error_rate / 2)
    return Project(
        crawler=crawler,
        bloom=bloom,
        fingerprint=fingerprint,
        fingerprinter=global_object_name(type(fingerprinter)),
        is_scrapys=fingerprint != fingerprinter.fingerprint,
    )


def url_list(argument: str, project: Project, options: argparse.Namespace) -> UrlList:
    """Return the URLs in a list: at a path, or on the standard input if that is "-"."""
    if "://" in argument:
        raise BloomError(f"{argument} is a URL; give a file with URLs")
    path = None if argument == "-" else Path(argument)
    return UrlList(path, project.url_fingerprint, options.field)


def _spider_class(settings: Settings, spider: str | None) -> type[Spider]:
    if spider is None or not settings.getlist("SPIDER_MODULES"):
        return Spider
    loader = load_object(settings["SPIDER_LOADER_CLASS"]).from_settings(settings.frozencopy())
    try:
        found: type[Spider] = loader.load(spider)
    except KeyError:
        known = ", ".join(sorted(loader.list())) or "none"
        raise BloomError(
            f"--spider {spider}: this project has no such spider; it has: {known}"
        ) from None
    return found


def connect(options: argparse.Namespace, project: Project) -> RedisPlace:
    """Return the place of a filter in Redis, once the server has answered.

    The project was loaded with its URL.
    """
    key = options.key
    if key is None:
        if "%(spider)s" in project.bloom.redis_key and not options.spider:
            raise UsageError(
                f"which filter? Give --key, or --spider with the spider's name (BLOOM_REDIS_KEY is "
                f"{project.bloom.redis_key!r})"
            )
        key = project.bloom.redis_key % {"spider": options.spider}
    if "{" in key or "}" in key:
        raise UsageError(f"--key is {key!r}; use a name without braces")
    return RedisPlace(answering_server(project), key)


def answering_server(project: Project) -> RedisServer:
    """Return the server of a project that was loaded with its URL, once it has answered.

    The wait is short, unless the command line says BLOOM_REDIS_DEADLINE_SECS.
    """
    server = project.bloom.redis_server()
    secs = server.deadline_secs
    priority = project.crawler.settings.getpriority("BLOOM_REDIS_DEADLINE_SECS")
    if priority != SETTINGS_PRIORITIES["cmdline"]:
        server.deadline_secs = min(secs, _FIRST_ANSWER_SECS)
    with ExitStack() as after_error:
        after_error.callback(server.close)
        server.now()
        after_error.pop_all()
    server.deadline_secs = secs
    return server


def project_place(options: argparse.Namespace, settings: Settings) -> str:
    """Return the place of the project's crawl: its server, its BLOOM_DIR or its JOBDIR.

    Raises a UsageError if the project's settings name none of them.
    """
    project = load_project(settings, options.spider)
    bloom, job_dir = project.bloom, project.crawler.settings.get("JOBDIR")
    if bloom.is_in_redis:
        return PROJECTS_SERVER
    if bloom.dir is not None and not (job_dir and options.subcommand == "queue"):
        if "%(spider)s" in bloom.dir and not options.spider:
            raise UsageError(f"which spider? Give --spider: BLOOM_DIR is {bloom.dir!r}")
        return str(bloom.directory(None, options.spider or ""))
    if job_dir:
        return str(job_dir)
    raise UsageError(
        "which filter? Give its place (the word redis for scrapy-redis's server), because the "
        "settings have neither BLOOM_REDIS_URL nor BLOOM_DIR nor JOBDIR"
    )


@contextmanager
def opened_place(options: argparse.Namespace, source: Settings | Project) -> Iterator[Place]:
    """Open the place of a command line; no project is loaded for a path."""
    if not is_redis(options.place):
        yield Path(options.place)
        return
    if not isinstance(source, Project):
        source = load_project(source, options.spider, options.place)
    place = connect(options, source)
    with closing(place.server):
        yield place


def place_name(place: Place) -> str:
    """Return the name of a place in messages."""
    return str(place) if isinstance(place, Path) else f"{place.key} in {place.server.address}"


def reader_of(place: Place, *, window: float = 0.0) -> Reader:
    """Return a reader of the filter at a place, which the caller closes.

    It answers as crawls with that BLOOM_WINDOW_SECS do.
    """
    if not isinstance(place, Path):
        return RedisReader(place.server, place.key, window=window)
    database = None if place.is_file() else job_database(place)
    # Read before the filter, so that a checkpoint between the two hides nothing.
    changes = read_recent(database) if database else ()
    recent = {change.fingerprint: change.forgets for change in changes}
    return FilterReader(place, window=window, recent=recent)


@contextmanager
def opened_for_crawl(options: argparse.Namespace, project: Project) -> Iterator[Reader]:
    """Open a filter for lookups with the project's fingerprints.

    Raises a FingerprinterMismatchError if the filter was recorded with another fingerprinter.
    """
    with (
        opened_place(options, project) as place,
        closing(reader_of(place, window=project.bloom.window_secs)) as reader,
    ):
        if reader.fingerprinter != project.fingerprinter:
            raise FingerprinterMismatchError(
                "the filter was recorded with REQUEST_FINGERPRINTER_CLASS = "
                f"{reader.fingerprinter!r}, and this project has {project.fingerprinter!r}, which "
                "would find nothing in it; run the command in the filter's project, or with "
                f"-s REQUEST_FINGERPRINTER_CLASS={reader.fingerprinter}"
            )
        yield reader


def job_database(path: Path) -> Path | None:
    """Return CrashSafeScheduler's database at a path, or None; the path may be that of a filter."""
    # The parent of a filter's directory may be its job. No other path belongs to its parent.
    for job_dir in (path, path.parent) if jobdir.filter_files(path) else (path,):
        if jobdir.is_database(database := job_dir / jobdir.DATABASE):
            return database
    return None


def state_text(is_closed: bool | None, is_in_use: bool | None) -> str:  # noqa: FBT001 - as readers have it
    """Describe whether a crawl uses a filter; a filter in Redis has no such state."""
    if is_in_use:
        return "in use by a running crawl"
    if is_closed is None:
        return "shared"
    if is_closed:
        return "closed"
    if is_in_use is None:
        return "not closed: in use, or its crawl was killed"
    return "not closed: its crawl was killed, or runs on another machine or in another container"
