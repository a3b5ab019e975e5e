"""The project's settings and request fingerprinter, as a crawl would use them."""

import argparse
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scrapy import Request, Spider
from scrapy.crawler import Crawler
from scrapy.settings import SETTINGS_PRIORITIES, Settings
from scrapy.utils.misc import build_from_crawler, load_object
from scrapy.utils.python import global_object_name

from scrapy_bloom.commands.shared.arguments import is_redis
from scrapy_bloom.commands.shared.lists import UrlList
from scrapy_bloom.crawl.fingerprinting import Fingerprint, fingerprint_function
from scrapy_bloom.exceptions import BloomError
from scrapy_bloom.settings.scrapy_redis import redis_params
from scrapy_bloom.settings.settings import BloomSettings


@dataclass(frozen=True)
class Project:
    """The settings and the fingerprinter of a crawl."""

    settings: Settings  # as the command got them
    bloom: BloomSettings
    fingerprint: Fingerprint
    fingerprinter: str  # import path of what makes it
    is_chosen: bool  # whether somebody chose that fingerprinter; else it is Scrapy's default
    spider: str  # its name; empty if none was said

    def url_fingerprint(self, url: str) -> bytes:
        """Return the fingerprint of a plain request for a URL; raises ValueError if it is none."""
        return self.fingerprint(Request(url))


def load_project(
    settings: Settings, spider: str | None = None, place: str = "", **more: Any
) -> Project:
    """Return the settings and the fingerprinter of a crawl with these settings.

    Args:
        settings: as the command got them.
        spider: the spider's name; in a project it must be one of its spiders.
        place: of a filter; if it is the URL of a server, the crawl uses that one. As in a crawl,
            REDIS_PARAMS then counts unless there is a BLOOM_REDIS_URL.
        more: settings that the command sets itself.
    """
    has_url = is_redis(place)
    if has_url:
        more |= {"BLOOM_BACKEND": "redis", "BLOOM_REDIS_URL": place}
    try:
        crawler = Crawler(_spider_class(settings, spider), settings)
        # Some fingerprinters ask for them.
        crawler.stats = load_object(crawler.settings["STATS_CLASS"])(crawler)
        # Before the add-ons: ours checks the settings.
        highest = max(SETTINGS_PRIORITIES.values())
        # No command schedules anything; what it fills may be for a crawl that does it otherwise.
        has_own_url = bool(crawler.settings.get("BLOOM_REDIS_URL"))
        if only_crawled := crawler.settings.get("BLOOM_RECORD_ON") == "crawled":
            more["BLOOM_RECORD_ON"] = "scheduled"
        for key, value in more.items():
            crawler.settings.set(key, value, priority=highest)
        BloomSettings.from_settings(crawler.settings)  # our add-on would tell of an error, too
        crawler.addons.load_settings(crawler.settings)
        name = "REQUEST_FINGERPRINTER_CLASS"
        fingerprinter = build_from_crawler(load_object(crawler.settings[name]), crawler)
    except BloomError:
        raise
    except Exception as error:
        raise BloomError(
            "the project's spider, add-ons or request fingerprinter cannot be made: "
            f"{type(error).__name__}: {error}"
        ) from error
    bloom = BloomSettings.from_settings(crawler.settings)
    if has_url and not has_own_url:
        bloom = replace(bloom, redis_params=redis_params(crawler.settings))
    if only_crawled:  # the other half of the rate is that of the filter in memory
        bloom = replace(bloom, error_rate=bloom.error_rate / 2)
    return Project(
        settings=settings,
        bloom=bloom,
        fingerprint=fingerprint_function(fingerprinter),
        fingerprinter=global_object_name(type(fingerprinter)),
        is_chosen=(crawler.settings.getpriority(name) or 0) > SETTINGS_PRIORITIES["default"],
        spider=spider or "",
    )


def url_list(argument: str, project: Project, options: argparse.Namespace) -> UrlList:
    """Return the URLs in a list: at a path, or on the standard input if that is "-"."""
    if "://" in argument:
        raise BloomError(f"{argument} is a URL; a file with URLs is meant here")
    return UrlList(
        None if argument == "-" else Path(argument),
        project.url_fingerprint,
        form=options.format,
        field=options.field,
    )


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
