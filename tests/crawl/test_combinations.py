"""Which scheduler goes with which filter and which directory: what is refused, and what is used."""

from pathlib import Path
from typing import Any

import pytest

from scrapy_bloom.job.reader import has_filter
from tests.support import servers
from tests.support.crawls import BLOOM, SCRAPY_REDIS, SHARED_SPIDER, Crawl
from tests.support.sites import ScriptedSite, Site
from tests.support.workspace import contents, in_redis

PAGES = 30  # of the tree
SAFE = {"SCHEDULER": "scrapy_bloom.CrashSafeScheduler"}
NOTHING = "scrapy.dupefilters.BaseDupeFilter"
SCRAPYS = "scrapy.dupefilters.RFPDupeFilter"
OWN = """
from scrapy.core.scheduler import Scheduler
from scrapy.dupefilters import BaseDupeFilter

class OwnScheduler(Scheduler):
    pass

class OwnFilter(BaseDupeFilter):
    pass
"""

SET_FILTER = f'set DUPEFILTER_CLASS = "{BLOOM}"'
SET_SCHEDULER = f'set SCHEDULER = "{SAFE["SCHEDULER"]}"'
ITS_QUEUE = "Scrapy's scheduler keeps its queue in the JOBDIR (job)"
IN_REDIS = {"redis": True}
REFUSED: list[tuple[dict[str, Any], list[str]]] = [
    ({**SAFE, "DUPEFILTER_CLASS": None}, [f'DUPEFILTER_CLASS is "{SCRAPYS}"', SET_FILTER]),
    ({**SAFE, "DUPEFILTER_CLASS": None, **IN_REDIS}, [f'is "{SCRAPYS}"', SET_FILTER]),
    ({**SAFE, "DUPEFILTER_CLASS": "own.OwnFilter"}, ['is "own.OwnFilter"', SET_FILTER]),
    ({**SAFE, "DUPEFILTER_CLASS": NOTHING, **IN_REDIS}, [f'is "{NOTHING}"', SET_FILTER]),
    (IN_REDIS, [ITS_QUEUE, "or remove JOBDIR"]),
    ({"SCHEDULER": "own.OwnScheduler", **IN_REDIS}, [ITS_QUEUE, SET_SCHEDULER]),
]


@pytest.mark.parametrize("paused", [{}, SAFE], ids=["a job of Scrapy's", "a job of ours"])
def test_refused_in_one_line_and_nothing_is_touched(
    paused: dict[str, Any], tree: Site, tmp_path: Path
) -> None:
    crawl = Crawl.held(tree, 10, tmp_path, {**paused, "JOBDIR": "job", "CONCURRENT_REQUESTS": 4})
    assert crawl.interrupt() == 0
    tree.forget()
    before = contents(tmp_path / "job")
    (tmp_path / "own.py").write_text(OWN)
    for given, reasons in REFUSED:
        settings = {"JOBDIR": "job", **given}
        if settings.pop("redis", False):
            settings = in_redis(tmp_path.name, **settings)
        error = Crawl(tree.url, tmp_path, settings).refusal()
        assert all(reason in error for reason in reasons), error
        assert contents(tmp_path / "job") == before
    assert not tree.hits
    assert not servers.shared("valkey").client.keys(f"*{tmp_path.name}*")


def test_with_neither_a_job_nor_redis_it_is_scrapys_scheduler(tree: Site, tmp_path: Path) -> None:
    crawl = Crawl.finished(tree.url, tmp_path, {**SAFE, "BLOOM_REDIS_KEY": "shared"})
    assert len(tree.hits) == PAGES
    assert "'scheduler/enqueued/memory'" in crawl.output
    line, key = crawl.our_lines("WARNING")
    assert "BLOOM_REDIS_KEY has no effect without BLOOM_REDIS_URL: the filter is in memory" in key
    assert "Set JOBDIR" in line.partition("CrashSafeScheduler behaves like Scrapy's own ")[2]
    assert not list(tmp_path.glob("*.sqlite"))


@pytest.mark.parametrize("before", [{}, SAFE], ids=["a job of Scrapy's", "a job of ours"])
def test_a_job_in_which_nothing_is_filtered_survives_a_kill(
    before: dict[str, Any], tmp_path: Path
) -> None:
    pages = [f"/{number}" for number in range(20)]
    site = ScriptedSite({"/": [(*pages, *pages[:5])]})
    settings = {"JOBDIR": "job", "DUPEFILTER_CLASS": NOTHING, "CONCURRENT_REQUESTS": 4}
    Crawl.held(site, 10, tmp_path, {**settings, **before}).kill()
    assert len(site.hits) < 21
    crawl = Crawl.finished(site.url, tmp_path, {**settings, **SAFE})
    warnings = crawl.our_lines("WARNING") + crawl.our_lines("ERROR")
    assert not warnings if before else "The last process did not close" in warnings[0]
    assert site.hits.keys() >= {"/", *pages}
    if before:  # both processes have crawled the start page, and what it links to
        assert all(site.hits[page] >= 2 for page in pages[:5])
    assert not has_filter(tmp_path / "job/bloom.sqlite")
    site.end()


def test_with_the_queue_in_redis_a_job_directory_is_for_other_things(
    tree: Site, tmp_path: Path
) -> None:
    settings = in_redis(tmp_path.name, **SAFE, JOBDIR="job")
    crawl = Crawl.held(tree, 10, tmp_path, settings)
    assert crawl.interrupt() == 0
    crawl = Crawl.finished(tree.url, tmp_path, settings)
    assert len(tree.hits) == PAGES
    assert "scheduler/enqueued/redis" in crawl.output
    assert not crawl.our_lines("WARNING") + crawl.our_lines("ERROR")
    assert [path.name for path in (tmp_path / "job").iterdir()] == ["spider.state"]


def test_scrapy_rediss_queue_is_in_no_job_directory(tree: Site, tmp_path: Path) -> None:
    settings = in_redis(tmp_path.name, **SCRAPY_REDIS, JOBDIR="job", IDLE_SECS=0)
    settings |= {"REDIS_URL": settings["BLOOM_REDIS_URL"], "SCHEDULER_PERSIST": False}
    Crawl.finished(tree.url, tmp_path, settings, spider=SHARED_SPIDER)
    assert len(tree.hits) == PAGES
