"""Open the place that a command line names."""

import argparse
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from scrapy.exceptions import UsageError
from scrapy.settings import Settings

from scrapy_bloom.commands.shared.arguments import PROJECTS_SERVER
from scrapy_bloom.commands.shared.path_place import open_path
from scrapy_bloom.commands.shared.place import Place
from scrapy_bloom.commands.shared.project import Project, load_project
from scrapy_bloom.commands.shared.redis_place import open_redis
from scrapy_bloom.redis.connection.url import SCHEMES, looks_like_url

_WITH_KEY = re.compile("([^#]+)#([^@]+)")  # an "@" would show that it is a part of a password
_HOST = re.compile(r"[\w.-]+:\d{1,5}(/\d+)?(#.*)?")  # a URL without its scheme
_SCHEMES = tuple(f"{scheme}://" for scheme in SCHEMES)


@contextmanager
def opened_place(
    options: argparse.Namespace,
    settings: Settings,
    text: str | None = None,
    *,
    is_new: bool = False,
    spider: str = "",
) -> Iterator[tuple[Place, Project]]:
    """Open a place in a `with` block, which gets the project, too.

    Args:
        options: of the command line, with `spider`.
        settings: of the command.
        text: the place: a path, REDIS-URL or REDIS-URL#KEY; by default, that of the options, or
            else the server or the JOBDIR of the project's settings.
        is_new: whether the filter may be missing.
        spider: the name in BLOOM_REDIS_KEY if there is neither a key nor --spider.
    """
    text = text or options.place or _projects_place(options, settings)
    url, key = split_url(text)
    project = load_project(settings, options.spider, url)
    if url is None:
        yield open_path(Path(text), is_new=is_new), project
    else:
        with open_redis(project, key, spider, is_new=is_new) as place:
            yield place, project


def _projects_place(options: argparse.Namespace, settings: Settings) -> str:
    project = load_project(settings, options.spider, None)
    if project.bloom.is_in_redis:
        return PROJECTS_SERVER
    if job_dir := project.crawler.settings.get("JOBDIR"):
        return str(job_dir)
    raise UsageError(
        "no place is given, and the settings have neither BLOOM_REDIS_URL nor JOBDIR; give a path, "
        "the URL of a server, as in redis://localhost:6379/0, or the word redis for the server of "
        "scrapy-redis's settings"
    )


def split_url(text: str) -> tuple[str | None, str | None]:
    """Return the URL and the key in REDIS-URL#KEY, in which the key is optional.

    Both are None for a path. Raises a UsageError for another URL, because a directory with its name
    would show the password.

    >>> split_url("redis://host/0#shop:bloom"), split_url("redis"), split_url("jobs/a#b")
    (('redis://host/0', 'shop:bloom'), ('redis', None), (None, None))
    """
    match = _WITH_KEY.fullmatch(text)
    url, key = (match[1], match[2]) if match else (text, None)
    if url == PROJECTS_SERVER or url.lower().startswith(_SCHEMES):
        return url, key
    if text.lower().startswith(("http:", "https:")):
        raise UsageError(
            f"{text} is the URL of a page, and that of a Redis server begins with redis://; "
            "give the filter first, and then URLs (import: a list of URLs, then the filter)"
        )
    if looks_like_url(text):
        raise UsageError(
            f"{text} is neither a path nor the URL of a Redis server, which begins with "
            f"{', '.join(_SCHEMES[:-1])} or {_SCHEMES[-1]}"
        )
    if _HOST.fullmatch(text) and not Path(text).exists():
        raise UsageError(f"{text} is not a path; if it is a server, put redis:// in front of it")
    return None, None
