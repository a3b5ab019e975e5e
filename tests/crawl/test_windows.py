"""Time windows of nightly crawls, and of workers that begin a run together."""

from pathlib import Path

import pytest

from tests.support.crawls import stat
from tests.support.ill_nights import LINKS, OrderedSite, clocked_job
from tests.support.jobs import Job
from tests.support.sites import ScriptedSite

DAY = 86_400
SCRAPYS = "scrapy.core.scheduler.Scheduler"
OURS = "scrapy_bloom.CrashSafeScheduler"


@pytest.mark.parametrize("scheduler", [SCRAPYS, OURS])
@pytest.mark.parametrize("place", ["JOBDIR", "Redis"])
def test_with_a_week_each_page_is_crawled_every_seventh_night(
    place: str, scheduler: str, tmp_path: Path
) -> None:
    settings = {"BLOOM_WINDOW_SECS": "7d", "SCHEDULER": scheduler}
    with (
        OrderedSite() as site,
        clocked_job(place, site, tmp_path, **settings) as (job, set_ahead),
    ):
        if scheduler == SCRAPYS:
            job.settings |= {"BLOOM_QUEUE_LEASE_SECS": None, "BLOOM_SHARED_LIMITS": None}
        site.answers = {"/": [("/a", "/b")], "/a": [("/b", "/a")]}
        for night in range(10):
            if night == 2:
                site.answers["/b"] = [("/new",)]
                site.answers["/"] = [("/a", "/b", "/new")]
            set_ahead(night * DAY)
            (crawl,) = job.crawl(f"{night}" if scheduler == OURS else "")
            pages = {0: ["/a", "/b"], 2: ["/new"], 7: ["/a", "/b"], 9: ["/new"]}.get(night, [])
            assert site.hits == dict.fromkeys(["/", *pages], 1), night
            if night in (7, 9):
                assert "expired after BLOOM_WINDOW_SECS (7 days)" in crawl.output
                assert stat(crawl, "bloom/expired") >= len(pages)


def test_workers_that_begin_a_run_at_once_crawl_each_expired_page_once(tmp_path: Path) -> None:
    pages = [f"/{number}" for number in range(20)]
    answers: dict[str, list] = {page: [(*pages,)] for page in ("/", *pages)}
    with ScriptedSite(answers) as site:
        settings = {"BLOOM_WINDOW_SECS": 0.5, "BLOOM_EXPECTED_REQUESTS": 10_000_000}
        job = Job("Redis", tmp_path, site, LINKS, workers=5, **settings)
        for night in range(10):
            job.crawl(f"{night}")
            assert site.hits == dict.fromkeys(["/", *pages], 1), night
