"""Workers that share filter and queue in a server that loses something: is every page crawled?"""

import random
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.support.crawls import SCRAPY_REDIS as SCRAPY_REDIS_QUEUE
from tests.support.crawls import SHARED_SPIDER, Crawl, are_finished
from tests.support.servers import Master, Server, wait_for
from tests.support.sites import ScriptedSite

LIMIT_SECS = 240.0  # that any single wait may take
SITE_SECS = 0.02  # before each answer
NEIGHBOURS = 4  # on each side, that a page links to

OURS, SCRAPY_REDIS = "BloomDupeFilter", "scrapy-redis's set"
FILTERS = {
    OURS: "scrapy_bloom.BloomDupeFilter",
    SCRAPY_REDIS: "scrapy_redis.dupefilter.RFPDupeFilter",
}


def linked_site(pages: int, *, links_to_all: bool = False) -> ScriptedSite:
    """Serve pages that link to children, neighbours and home page, or else each to all others."""

    def links(number: int) -> Sequence[int]:
        if links_to_all:
            return range(1, pages + 1)
        near = range(number - NEIGHBOURS, number + NEIGHBOURS + 1)
        # Neighbours only where they are of the same age: else all is found in the first minute.
        found = [n for n in near if n.bit_length() == number.bit_length()]
        return [n for n in (*found, 2 * number, 2 * number + 1, 1) if 0 < n <= pages]

    paths = {number: f"/{number}" if number > 1 else "/" for number in range(1, pages + 1)}
    site = ScriptedSite({paths[n]: [tuple(paths[m] for m in links(n))] for n in paths})
    site.delay = SITE_SECS
    return site


@dataclass(frozen=True)
class Way:
    """How the server loses something."""

    name: str  # for people
    keep: Callable[[Any], None]  # what will be left of the server's state, some time before
    lose: Callable[[Any, float], None]  # kills the server, and brings it back with what was kept
    # between the two, at least and at most; else it is a part of the crawl
    secs: tuple[float, float] | None = None
    options: Sequence[str] = ()  # of the server
    has_replica: bool = False  # whether it has one


def _take_over(server: Master, pause: float) -> None:
    server.kill()
    time.sleep(pause)
    server.be_replaced()


WAYS = (
    Way("killed, back empty", lambda _: None, Server.restart),
    Way("flushed, not killed", lambda _: None, lambda server, _: server.client.flushall()),
    Way("killed, back from a snapshot", lambda server: server.client.save(), Server.restart),
    Way(
        "killed, back without its last second",
        Server.keep,
        partial(Server.restart, is_set_back=True),
        (0.3, 1.0),
        options=("--appendonly", "yes"),
    ),
    Way("killed, its replica takes over", Master.promote, _take_over, (0.1, 0.5), has_replica=True),
)


@dataclass(frozen=True)
class Outcome:
    """What became of a crawl."""

    way: str
    name: str  # of the filter
    lost_at: int  # pages that were crawled when the server lost something
    missing: Sequence[str]  # paths that were never crawled
    crawled: int  # answers of the site
    warnings: Sequence[Sequence[str]]  # of our filter that something was lost, for each worker
    has_ended: bool  # every worker ended by itself, and was finished


def crawl(
    way: Way, name: str, directory: Path, *, site: ScriptedSite, workers: int, seed: str
) -> Outcome:
    """Crawl a site with workers, whose server loses something meanwhile; end the site."""
    rng = random.Random(seed)
    pages = len(site.answers)
    first, second = rng.uniform(0.1, 0.3) * pages, rng.uniform(0.35, 0.6) * pages
    with site, (Master if way.has_replica else Server)("valkey", *way.options) as server:
        settings = {
            **SCRAPY_REDIS_QUEUE,
            "DUPEFILTER_CLASS": FILTERS[name],
            "BLOOM_EXPECTED_REQUESTS": 10_000,
            "REDIS_URL": server.url,
            "IDLE_SECS": 1,
        }
        crawls = [
            Crawl(site.url, directory / f"worker-{number}", settings, spider=SHARED_SPIDER)
            for number in range(workers)
        ]
        if way.secs is None:
            wait_for(lambda: len(site.hits) >= first, lambda: crawls[0].output, LIMIT_SECS)
            way.keep(server)
        wait_for(lambda: len(site.hits) >= second, lambda: crawls[0].output, LIMIT_SECS)
        if way.secs is not None:
            way.keep(server)
            time.sleep(rng.uniform(*way.secs))
        lost_at = len(site.hits)
        way.lose(server, rng.uniform(0, 0.5))
        has_ended = are_finished(crawls, site.total, LIMIT_SECS)
        return Outcome(
            way=way.name,
            name=name,
            lost_at=lost_at,
            missing=sorted(set(site.answers) - set(site.hits)),
            crawled=site.total(),
            warnings=[
                re.findall(r".* lost.*", "\n".join(each_crawl.our_lines("WARNING")))
                for each_crawl in crawls
            ],
            has_ended=has_ended,
        )
