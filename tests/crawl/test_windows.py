"""Time windows of nightly crawls, and of workers that begin a run together."""

from pathlib import Path

import pytest

from tests.support.crawls import stat
from tests.support.ill_nights import OrderedSite, clocked_job

DAY = 86_400
SCRAPYS = "scrapy.core.scheduler.Scheduler"
OURS = "scrapy_bloom.CrashSafeScheduler"


@pytest.mark.parametrize(("place", "scheduler"), [("JOBDIR", SCRAPYS), ("Redis", OURS)])
def test_with_a_week_each_page_is_crawled_every_seventh_night(
    place: str, scheduler: str, tmp_path: Path
) -> None:
    settings = {"BLOOM_WINDOW_SECS": "7d", "SCHEDULER": scheduler}
    with (
        OrderedSite() as site,
        clocked_job(place, site, tmp_path, **settings) as (job, set_ahead),
    ):
        site.answers = {"/": [("/a", "/b")], "/a": [("/b", "/a")]}
        for night in (0, 1, 2, 4, 6, 7, 9):
            if night == 2:
                site.answers["/b"] = [("/new",)]
                site.answers["/"] = [("/a", "/b", "/new")]
            set_ahead(night * DAY)
            (crawl,) = job.crawl(f"{night}" if scheduler == OURS else "")
            pages = {0: ["/a", "/b"], 2: ["/new"], 7: ["/a", "/b"], 9: ["/new"]}.get(night, [])
            assert site.hits == dict.fromkeys(["/", *pages], 1), night
            if night in (7, 9):
                assert "expired after BLOOM_WINDOW_SECS (604,800 s)" in crawl.output
                assert stat(crawl, "bloom/expired") >= len(pages)
