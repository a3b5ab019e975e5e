"""The project of a command line: its settings, its spider, its server, its fingerprints."""

import os
from dataclasses import replace
from typing import Any, NamedTuple

from scrapy import Request, Spider
from scrapy.crawler import Crawler
from scrapy.exceptions import UsageError
from scrapy.settings import SETTINGS_PRIORITIES, Settings
from scrapy.utils.misc import build_from_crawler, load_object
from scrapy.utils.python import global_object_name

from scrapy_bloom.commands.shared.cli import PROJECTS_SERVER
from scrapy_bloom.commands.shared.lists import Fields
from scrapy_bloom.crawl.fingerprinting import fingerprint_function, plain_fingerprint
from scrapy_bloom.exceptions import BloomError, FingerprinterMismatchError
from scrapy_bloom.generations.policy import Origin
from scrapy_bloom.queues.serialized import serialized
from scrapy_bloom.queues.store import Entered
from scrapy_bloom.settings import BloomSettings, checked_url


class Addition(NamedTuple):
    """A request that is added to a queue."""

    request: Request  # without its callback
    values: dict[str, Any]  # in the form of `Request.to_dict`, with the name of the callback
    fingerprint: bytes

    @property
    def as_it_enters(self) -> tuple[Request, Entered]:
        """Return the request, and how it enters a store, without slot and order."""
        page = None if self.request.dont_filter else self.fingerprint
        return self.request, Entered(serialized(self.values), page)


class Project:
    """The settings and the fingerprinter of a crawl, for an optional spider of the project."""

    def __init__(self, settings: Settings, spider: str | None, url: str | None) -> None:
        self.spider = spider or ""
        try:
            self.crawler = Crawler(_spider_class(settings, spider), settings)  # it is not started
            # Some fingerprinters use the stats.
            self.crawler.stats = load_object(self.crawler.settings["STATS_CLASS"])(self.crawler)
            if url is not None and url != PROJECTS_SERVER:
                checked_url("the URL", url)
                priority = max(SETTINGS_PRIORITIES.values())
                self.crawler.settings.set("BLOOM_REDIS_URL", url, priority)
            self.crawler.addons.load_settings(self.crawler.settings)
            in_redis = url is not None
            self.bloom = BloomSettings.from_settings(self.crawler.settings, scrapy_redis=in_redis)
            class_ = load_object(self.crawler.settings["REQUEST_FINGERPRINTER_CLASS"])
            fingerprinter = build_from_crawler(class_, self.crawler)
        except (BloomError, UsageError):
            raise
        except Exception as error:
            raise BloomError(
                "the project's spider, add-ons or request fingerprinter cannot be created: "
                f"{type(error).__name__}: {error}"
            ) from error
        if in_redis and (password := os.environ.get("REDISCLI_AUTH")):
            params = {"password": password, **self.bloom.redis_params}
            self.bloom = replace(self.bloom, redis_params=params)
        self.fingerprinter = global_object_name(type(fingerprinter))
        self._fingerprint = fingerprint_function(fingerprinter)
        # `plain_fingerprint` makes the same fingerprints.
        self._is_scrapys = self._fingerprint != fingerprinter.fingerprint

    def fingerprint(self, request: Request) -> bytes:
        """Return the fingerprint of a request; raise a ValueError if the request is not valid."""
        try:
            return bytes(memoryview(self._fingerprint(request)))  # it may return a text
        except ValueError:
            raise
        except Exception as error:
            raise BloomError(
                f"the project's request fingerprinter failed for {request}: "
                f"{type(error).__name__}: {error}"
            ) from error

    def fingerprint_of(self, url: str, fields: Fields) -> bytes:
        """Return the fingerprint of a line of a list; raise a ValueError if it is not valid."""
        plain = plain_fingerprint(url) if self._is_scrapys and not fields else None
        return plain or self.fingerprint(made_request(url, fields))

    def check_callback(self, name: str | None) -> None:
        """Raise a UsageError if the spider of --spider lacks a method."""
        class_ = self.crawler.spidercls
        if class_ is not Spider and name and not callable(getattr(class_, name, None)):
            raise UsageError(f"--callback {name}: the spider {self.spider!r} has no such method")

    def check_fingerprinter(self, origin: Origin) -> None:
        """Raise a FingerprinterMismatchError if a filter has fingerprints of another kind."""
        if origin.fingerprinter != self.fingerprinter:
            raise FingerprinterMismatchError.of(
                "the filter", origin.fingerprinter, self.fingerprinter, "another filter"
            )


def made_request(url: str, fields: Fields) -> Request:
    """Return the request of a line of a list; raise a ValueError if it is not valid."""
    try:
        return Request(url, **{name: fields[name] for name in fields if name != "callback"})
    except TypeError as error:  # of a header, for example
        raise ValueError(str(error)) from None


def _spider_class(settings: Settings, spider: str | None) -> type[Spider]:
    """Return the class of a spider of the project; outside a project, that of any spider."""
    if spider is None or not settings.getlist("SPIDER_MODULES"):
        return Spider
    loader = load_object(settings["SPIDER_LOADER_CLASS"]).from_settings(settings.frozencopy())
    try:
        loaded: type[Spider] = loader.load(spider)
    except KeyError:
        known = ", ".join(sorted(loader.list())) or "none"
        raise UsageError(
            f"--spider {spider}: this project has no such spider; it has: {known}"
        ) from None
    return loaded
