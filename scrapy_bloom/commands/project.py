"""What a crawl of this project would use: its settings and its request fingerprinter."""

import argparse
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scrapy import Request, Spider
from scrapy.crawler import Crawler
from scrapy.exceptions import UsageError
from scrapy.settings import SETTINGS_PRIORITIES, Settings
from scrapy.utils.misc import build_from_crawler, load_object
from scrapy.utils.python import global_object_name

from scrapy_bloom.commands.output import masked, note
from scrapy_bloom.exceptions import BloomError
from scrapy_bloom.fingerprinting import Fingerprint, fingerprint_function
from scrapy_bloom.jobqueues import has_waiting
from scrapy_bloom.lists import FORMATS
from scrapy_bloom.redis_server import RedisServer
from scrapy_bloom.redis_settings import redis_params
from scrapy_bloom.settings import BloomSettings
from scrapy_bloom.sources import UrlList

_REDIS_SCHEMES = ("redis://", "rediss://", "unix://")
_DEADLINE = "BLOOM_REDIS_DEADLINE_SECS"
_FIRST_ANSWER_SECS = 1.5  # somebody waits for it, and has perhaps mistyped the URL


def add_spider(parser: argparse.ArgumentParser) -> None:
    """The option of each subcommand that makes fingerprints or filters."""
    parser.add_argument(
        "--spider",
        metavar="NAME",
        help="the spider that the filter is for: its custom_settings count, and its name in "
        "BLOOM_REDIS_KEY",
    )


def add_key(parser: argparse.ArgumentParser) -> None:
    """The option of each subcommand that takes the URL of a Redis server."""
    parser.add_argument(
        "--key",
        metavar="NAME",
        help="the filter's name in Redis, for example shop:bloom (default: BLOOM_REDIS_KEY with "
        "the name that --spider says)",
    )


def is_redis(place: str) -> bool:
    """Whether a place is the URL of a server, and no path.

    Raises:
        BloomError: it is another URL. A directory of that name would bear its password.
    """
    if place.lower().startswith(_REDIS_SCHEMES):
        return True
    if "://" in place:
        raise BloomError(
            f"{masked(place)} is neither a path nor the URL of a Redis server, which begins with "
            "redis://, with rediss:// (for TLS) or with unix://"
        )
    return False


def path_argument(text: str) -> Path:
    """A command-line argument that must be a path.

    Raises:
        argparse.ArgumentTypeError: it is a URL.
    """
    if "://" in text:
        raise argparse.ArgumentTypeError(f"{masked(text)} is a URL; a path is meant here")
    return Path(text)


def say_where(directory: Path) -> None:
    """Say how a crawl finds a filter."""
    if directory.name != "bloom":
        note(
            f"Crawls use it with BLOOM_DIR = {str(directory)!r}. (A crawl with a JOBDIR and no "
            "BLOOM_DIR has its filter in JOBDIR/bloom)"
        )


def warn_of_queue(directory: Path) -> None:
    """Say so if requests that a filter holds wait in its job's queue."""
    job_dir = directory.parent
    if directory.name != "bloom":
        return
    if has_waiting(job_dir):
        note(
            f"scrapy bloom: warning: requests that are recorded in {directory} wait in the queue "
            f"of {job_dir}, and are not crawled yet. A crawl with the copy takes them for seen: "
            f"let that job finish first, or let one crawl with the copy have {job_dir} as JOBDIR"
        )


@dataclass(frozen=True)
class Project:
    """What a crawl would use.

    Attributes:
        bloom: the BLOOM_* settings.
        fingerprint: makes the fingerprint of a request.
        fingerprinter: import path of what makes it.
        is_chosen: whether somebody chose that fingerprinter; else it is Scrapy's default.
        spider: the spider's name; empty if none was said.
    """

    bloom: BloomSettings
    fingerprint: Fingerprint
    fingerprinter: str
    is_chosen: bool
    spider: str

    def url_fingerprint(self, url: str) -> bytes:
        """The fingerprint of a plain request for a URL.

        Raises:
            ValueError: it is no URL.
        """
        return self.fingerprint(Request(url))


def load_project(settings: Settings, spider: str | None = None, **more: Any) -> Project:
    """What a crawl with these settings would use.

    Args:
        settings: as the command got them.
        spider: the spider's name; in a project it must be one of its spiders.
        more: settings that the command sets itself.

    Raises:
        SettingError: a setting is not valid.
        BloomError: there is no such spider, or the fingerprinter cannot be made.
    """
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
    if "BLOOM_REDIS_URL" in more and not has_own_url:
        bloom = replace(bloom, redis_params=redis_params(crawler.settings))
    if only_crawled:  # the other half of the rate is that of the filter in memory
        bloom = replace(bloom, error_rate=bloom.error_rate / 2)
    return Project(
        bloom=bloom,
        fingerprint=fingerprint_function(fingerprinter),
        fingerprinter=global_object_name(type(fingerprinter)),
        is_chosen=(crawler.settings.getpriority(name) or 0) > SETTINGS_PRIORITIES["default"],
        spider=spider or "",
    )


def connect(
    settings: Settings,
    url: str,
    *,
    key: str | None,
    spider: str | None,
    made_for: str = "",
) -> tuple[RedisServer, str, BloomSettings]:
    """Return the server of a URL, once it has answered, and the name of a filter there.

    It is waited for a moment only, unless the command line says BLOOM_REDIS_DEADLINE_SECS.

    Args:
        settings: as the command got them; BLOOM_REDIS_CLUSTER and the like count, and as in a
            crawl REDIS_PARAMS unless there is a BLOOM_REDIS_URL.
        url: as in BLOOM_REDIS_URL.
        key: as --key says.
        spider: as --spider says.
        made_for: the spider's name if --spider says none.

    Raises:
        UsageError: which filter is not said.
        SettingError: the URL or a setting is not valid.
        StorageError: the server is out of reach, or refuses.
    """
    bloom = load_project(settings, spider, **redis_settings(url)).bloom
    name = spider or made_for
    if key is not None and ("{" in key or "}" in key):
        raise UsageError(f"--key is {key!r}; allowed is a name without braces")
    if key is None:
        if "%(spider)s" in bloom.redis_key and not name:
            raise UsageError(
                f"which filter? Say it with --key, or the spider with --spider (BLOOM_REDIS_KEY is "
                f"{bloom.redis_key!r})"
            )
        key = bloom.redis_key % {"spider": name}
    deadline_secs = bloom.redis_deadline_secs

    def server(deadline_secs: float) -> RedisServer:
        return RedisServer(
            url,
            params=bloom.redis_params,
            cluster=bloom.redis_cluster,
            sentinel=bloom.redis_sentinel,
            deadline_secs=deadline_secs,
        )

    is_asked_for = settings.getpriority(_DEADLINE) == SETTINGS_PRIORITIES["cmdline"]
    first_secs = deadline_secs if is_asked_for else min(deadline_secs, _FIRST_ANSWER_SECS)
    with closing(server(first_secs)) as first:
        first.now()
    return server(deadline_secs), key, bloom


def redis_settings(url: str) -> dict[str, Any]:
    """The settings of a crawl that uses that server, whatever else the project's are for."""
    return {"BLOOM_BACKEND": "redis", "BLOOM_REDIS_URL": url}


def redis_argument(text: str) -> str:
    """A command-line argument that must be the URL of a Redis server.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    if not text.lower().startswith(_REDIS_SCHEMES):
        raise argparse.ArgumentTypeError(
            f"{masked(text)} is no URL of a Redis server: redis://, rediss:// or unix://"
        )
    return text


def add_list(parser: argparse.ArgumentParser, *others: str) -> None:
    """The options of each subcommand that reads a list of URLs.

    Args:
        parser: of the subcommand.
        others: what the list may be beside those.
    """
    parser.add_argument(
        "--format",
        choices=[*others, *FORMATS],
        help="what the list is: a URL a line, JSON lines or CSV (default: what its name ends with, "
        "or it begins with)",
    )
    parser.add_argument(
        "--field",
        default="url",
        metavar="NAME",
        help="the field or column with the URL, in JSON lines and CSV (default: url)",
    )


def url_list(argument: str, project: Project, options: argparse.Namespace) -> UrlList:
    """The URLs that a command-line argument names, "-" being the standard input.

    Args:
        argument: a path, or "-".
        project: makes the fingerprints.
        options: those of `add_list`.

    Raises:
        BloomError: it is a URL.
    """
    if "://" in argument:
        raise BloomError(f"{masked(argument)} is a URL; a file with URLs is meant here")
    return UrlList(
        None if argument == "-" else Path(argument),
        project.url_fingerprint,
        form=options.format,
        field=options.field,
    )


def check_skipped(urls: UrlList) -> None:
    """Check that nothing in a list was left out.

    Raises:
        BloomError: some lines are no URLs. The others have been read.
    """
    if urls.skipped:
        raise BloomError(
            f"{urls.skipped:,} lines are no URLs and were left out; the first: {urls.first_skipped}"
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
