"""The project of a command line: its settings, its spider, its server, its fingerprints."""

import argparse
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scrapy import Request, Spider
from scrapy.crawler import Crawler
from scrapy.settings import SETTINGS_PRIORITIES, Settings
from scrapy.utils.misc import build_from_crawler, load_object
from scrapy.utils.python import global_object_name

from scrapy_bloom.commands.shared.arguments import PROJECTS_SERVER
from scrapy_bloom.commands.shared.lists import UrlList
from scrapy_bloom.crawl.fingerprinting import (
    Fingerprint,
    fingerprint_function,
    plain_fingerprint,
)
from scrapy_bloom.exceptions import BloomError
from scrapy_bloom.redis.connection.server import RedisServer
from scrapy_bloom.settings import BloomSettings, url_with_login

FINGERPRINTER = "REQUEST_FINGERPRINTER_CLASS"

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
    settings: Settings, spider: str | None = None, url: str | None = None, **more: Any
) -> Project:
    """Return the settings and the fingerprinter of a crawl with these settings.

    Args:
        settings: as the command got them.
        spider: the spider's name; in a project it must be one of its spiders.
        url: of the server that the crawl uses, with the login from the settings or REDISCLI_AUTH;
            "redis" is that of the settings.
        more: settings that the command sets itself.
    """
    try:
        crawler = Crawler(_spider_class(settings, spider), settings)
        # Some fingerprinters use the stats.
        crawler.stats = load_object(crawler.settings["STATS_CLASS"])(crawler)
        params: Mapping[str, Any] | None = None
        if url is not None and url != PROJECTS_SERVER:
            more["BLOOM_REDIS_URL"], params = url_with_login(url, crawler.settings)
        crawler.settings.setdict(more, priority=max(SETTINGS_PRIORITIES.values()))
        crawler.addons.load_settings(crawler.settings)
        bloom = BloomSettings.from_settings(crawler.settings, scrapy_redis=url is not None)
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
    if url is not None and (password := os.environ.get("REDISCLI_AUTH")):
        bloom = replace(bloom, redis_params={"password": password, **bloom.redis_params})
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
