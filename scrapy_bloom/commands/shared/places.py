"""Places of the filters that a command line names: in files, or in Redis."""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from scrapy.exceptions import UsageError
from scrapy.settings import SETTINGS_PRIORITIES, Settings

from scrapy_bloom.commands.shared.arguments import REDIS_SCHEMES
from scrapy_bloom.commands.shared.output import masked, note
from scrapy_bloom.commands.shared.project import Project, load_project
from scrapy_bloom.exceptions import BloomError, FingerprinterMismatchError
from scrapy_bloom.files.mapping import FoundFile
from scrapy_bloom.files.reader import FilterReader
from scrapy_bloom.job.locks import LOCK_NAME, is_held
from scrapy_bloom.queues.conflicts import has_waiting
from scrapy_bloom.redis.connection.server import RedisServer
from scrapy_bloom.redis.reader import RedisReader
from scrapy_bloom.settings.settings import BloomSettings

_DEADLINE = "BLOOM_REDIS_DEADLINE_SECS"
_FIRST_ANSWER_SECS = 1.5  # somebody waits for it, and has perhaps mistyped the URL


def is_redis(place: str) -> bool:
    """Return whether a place is the URL of a server, and no path.

    Raises:
        BloomError: it is another URL. A directory of that name would bear its password.
    """
    if place.lower().startswith(REDIS_SCHEMES):
        return True
    if "://" in place:
        raise BloomError(
            f"{masked(place)} is neither a path nor the URL of a Redis server, which begins with "
            "redis://, with rediss:// (for TLS) or with unix://"
        )
    return False


def connect(
    options: argparse.Namespace, settings: Settings, url: str, *, made_for: str = ""
) -> tuple[RedisServer, str, BloomSettings]:
    """Return the server of a URL, once it has answered, and the name of a filter there.

    Args:
        options: --key and --spider.
        settings: as the command got them; BLOOM_REDIS_CLUSTER and the like count, and as in a
            crawl REDIS_PARAMS unless there is a BLOOM_REDIS_URL.
        url: as in BLOOM_REDIS_URL.
        made_for: the spider's name if --spider says none.

    Raises:
        UsageError: which filter is not said.
        SettingError: the URL or a setting is not valid.
        StorageError: the server is out of reach, or refuses.
    """
    bloom = load_project(settings, options.spider, **redis_settings(url)).bloom
    key, name = options.key, options.spider or made_for
    if key is not None and ("{" in key or "}" in key):
        raise UsageError(f"--key is {key!r}; allowed is a name without braces")
    if key is None:
        if "%(spider)s" in bloom.redis_key and not name:
            raise UsageError(
                f"which filter? Say it with --key, or the spider with --spider (BLOOM_REDIS_KEY is "
                f"{bloom.redis_key!r})"
            )
        key = bloom.redis_key % {"spider": name}
    return answering_server(settings, url, bloom), key, bloom


def answering_server(settings: Settings, url: str, bloom: BloomSettings) -> RedisServer:
    """Return a server that has answered.

    It is waited for a moment only, unless the command line says BLOOM_REDIS_DEADLINE_SECS.

    Raises:
        SettingError: the URL is not valid.
        StorageError: the server is out of reach, or refuses.
    """
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
    return server(deadline_secs)


def redis_settings(url: str) -> dict[str, Any]:
    """Return the settings of a crawl that uses that server, whatever the project's own are."""
    return {"BLOOM_BACKEND": "redis", "BLOOM_REDIS_URL": url}


@contextmanager
def opened_filter(
    options: argparse.Namespace, settings: Settings, project: Project
) -> Iterator[FilterReader | RedisReader]:
    """Open the filter of a project's crawls, to be looked at.

    Raises:
        FingerprinterMismatchError: it was recorded with other fingerprints than this project's.
        StorageError: or one of its children: see `FilterReader` and `RedisReader`.
    """
    window = project.bloom.window_secs
    if is_redis(options.place):
        server, key, _ = connect(options, settings, options.place)
        with closing(server):
            shared = RedisReader(server, key, window=window)
            _check_fingerprinter(shared.info.fingerprinter, project.fingerprinter)
            yield shared
    else:
        with closing(FilterReader(Path(options.place), window=window)) as reader:
            _check_fingerprinter(reader.files[-1].header.fingerprinter, project.fingerprinter)
            yield reader


def _check_fingerprinter(there: str, here: str) -> None:
    if there != here:
        raise FingerprinterMismatchError(
            f"the filter was recorded with REQUEST_FINGERPRINTER_CLASS = {there!r}, and this "
            f"project has {here!r}, which would find nothing in it; run the command in the "
            f"filter's project, or with -s REQUEST_FINGERPRINTER_CLASS={there}"
        )


def use_of(files: Sequence[FoundFile]) -> Mapping[str, bool | None]:
    """Return, for `state_text`, whether a filter was closed, and whether a crawl has it now."""
    return {
        "closed": not any(each.state.in_use for each in files),
        "in_use": is_held(files[-1].path.with_name(LOCK_NAME)),
    }


def state_text(*, closed: bool | None, in_use: bool | None) -> str:
    """Return whether a crawl uses a filter, for people; one in Redis is neither closed nor not."""
    if in_use:
        return "in use by a running crawl"
    if closed is None:
        return "shared"
    if closed:
        return "closed"
    if in_use is None:
        return "not closed: in use, or its crawl was killed"
    return "not closed: its crawl was killed, or runs on another machine or in another container"


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
