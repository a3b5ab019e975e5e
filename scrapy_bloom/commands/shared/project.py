"""The project of a command line: its settings, its spider, its server, its fingerprints."""

import os
from collections.abc import Mapping
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
from scrapy_bloom.settings import BloomSettings

_OF_REQUEST = ("url", "method", "headers", "body", "meta", "encoding", "priority")


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

    def has_callback(self, name: str | None) -> bool:
        """Return whether the spider of --spider has a method; True if the spider is not known."""
        spider = self.crawler.spidercls
        return spider is Spider or name is None or callable(getattr(spider, name, None))


def made_request(url: str, fields: Fields) -> Request:
    """Return the request of a line of a list; raise a ValueError if it is not valid."""
    try:
        return Request(url, **{name: fields[name] for name in fields if name != "callback"})
    except TypeError as error:  # of a header, for example
        raise ValueError(str(error)) from None


def request_of(values: Mapping[str, Any]) -> Request:
    """Return a request without its callback, for its fingerprint and its slot."""
    return Request(**{name: values[name] for name in _OF_REQUEST})


def load_project(settings: Settings, spider: str | None, url: str | None) -> Project:
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
        class_ = load_object(crawler.settings["REQUEST_FINGERPRINTER_CLASS"])
        fingerprinter = build_from_crawler(class_, crawler)
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
        loaded: type[Spider] = loader.load(spider)
    except KeyError:
        known = ", ".join(sorted(loader.list())) or "none"
        raise UsageError(
            f"--spider {spider}: this project has no such spider; it has: {known}"
        ) from None
    return loaded
