"""The project of a command line: its settings, its spider, its server, its fingerprints."""

import os
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from scrapy import Request, Spider
from scrapy.crawler import Crawler
from scrapy.exceptions import UsageError
from scrapy.settings import SETTINGS_PRIORITIES, BaseSettings, Settings
from scrapy.utils.misc import build_from_crawler, load_object
from scrapy.utils.python import global_object_name

from scrapy_bloom.commands.shared.arguments import PROJECTS_SERVER
from scrapy_bloom.commands.shared.lists import Fields
from scrapy_bloom.crawl.fingerprinting import (
    Fingerprint,
    fingerprint_function,
    plain_fingerprint,
)
from scrapy_bloom.exceptions import BloomError
from scrapy_bloom.redis.connection.server import RedisServer
from scrapy_bloom.settings import BloomSettings

FINGERPRINTER = "REQUEST_FINGERPRINTER_CLASS"

_FIRST_ANSWER_SECS = 1.5  # short, because the URL may be mistyped


@dataclass(frozen=True)
class Project:
    """The settings and the fingerprinter of a crawl of the project."""

    crawler: Crawler  # not started
    bloom: BloomSettings
    fingerprint: Fingerprint
    fingerprinter: str  # its import path
    spider: str  # its name, if it was given
    is_scrapys: bool  # `plain_fingerprint` makes the same fingerprints

    def fingerprint_of(self, url: str, fields: Fields) -> bytes:
        """Return the fingerprint of a request; raise a ValueError if it is not valid."""
        plain = plain_fingerprint(url) if self.is_scrapys and not fields else None
        fingerprint = plain or self.fingerprint(made_request(url, fields))
        if not isinstance(fingerprint, bytes):
            raise BloomError(
                "the project's request fingerprinter returns "
                f"{type(fingerprint).__name__}, not bytes; no crawl could use it, either"
            )
        return fingerprint

    def find_spider(self, name: str) -> type[Spider] | None:
        """Return the spider of --spider; else that of a job ("": unknown), or the only one."""
        if (known := self.crawler.spidercls) is not Spider:
            return known
        loader = _spider_loader(self.crawler.settings)
        names = loader.list() if loader else []
        if loader and (name in names or (not name and len(names) == 1)):
            found: type[Spider] = loader.load(name or names[0])
            return found
        return None


def made_request(url: str, fields: Fields) -> Request:
    """Return the request of a line of a list; raise a ValueError if it is not valid."""
    try:
        return Request(url, **{name: fields[name] for name in fields if name != "callback"})
    except TypeError as error:  # of a header, for example
        raise ValueError(str(error)) from None


def load_project(settings: Settings, spider: str | None = None, url: str | None = None) -> Project:
    """Return the settings and the fingerprinter of a crawl, for an optional spider of the project.

    The server with the URL gets the password in REDISCLI_AUTH.
    """
    try:
        crawler = Crawler(_spider_class(settings, spider), settings)
        # Some fingerprinters use the stats.
        crawler.stats = load_object(crawler.settings["STATS_CLASS"])(crawler)
        if url is not None and url != PROJECTS_SERVER:
            priority = max(SETTINGS_PRIORITIES.values())
            crawler.settings.set("BLOOM_REDIS_URL", url, priority)
        crawler.addons.load_settings(crawler.settings)
        bloom = BloomSettings.from_settings(crawler.settings, scrapy_redis=url is not None)
        fingerprinter = build_from_crawler(load_object(crawler.settings[FINGERPRINTER]), crawler)
    except (BloomError, UsageError):
        raise
    except Exception as error:
        raise BloomError(
            "the project's spider, add-ons or request fingerprinter cannot be created: "
            f"{type(error).__name__}: {error}"
        ) from error
    fingerprint = fingerprint_function(fingerprinter)
    if url is not None and (password := os.environ.get("REDISCLI_AUTH")):
        bloom = replace(bloom, redis_params={"password": password, **bloom.redis_params})
    return Project(
        crawler=crawler,
        bloom=bloom,
        fingerprint=fingerprint,
        fingerprinter=global_object_name(type(fingerprinter)),
        spider=spider or "",
        is_scrapys=fingerprint != fingerprinter.fingerprint,
    )


def _spider_loader(settings: BaseSettings) -> Any:
    """Return the spiders of the project; None outside a project."""
    if not settings.getlist("SPIDER_MODULES"):
        return None
    return load_object(settings["SPIDER_LOADER_CLASS"]).from_settings(settings.frozencopy())


def _spider_class(settings: Settings, spider: str | None) -> type[Spider]:
    if spider is None or (loader := _spider_loader(settings)) is None:
        return Spider
    try:
        found: type[Spider] = loader.load(spider)
    except KeyError:
        known = ", ".join(sorted(loader.list())) or "none"
        raise UsageError(
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
