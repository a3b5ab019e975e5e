"""BLOOM_MAX_PAGES_PER_SLOT: the requests of a host in all runs of a job, and by all workers."""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from scrapy_bloom.job.jobdir import DATABASE
from tests.support.crawls import BLOOM, Crawl, stat
from tests.support.shared_crawls import SharedCrawl
from tests.support.sites import ScriptedSite, Site

SAFE = {"SCHEDULER": "scrapy_bloom.CrashSafeScheduler"}
MOST = 30  # fewer than the site has
MANY = 60  # likewise, and more than one worker takes at once
DROPPED = "scheduler/dropped/slot_limit"
LINE = f"has had its {MOST} requests (BLOOM_MAX_PAGES_PER_SLOT): further requests to it are dropped"


def test_a_job_counts_over_a_pause_and_a_kill(tree: Site, tmp_path: Path) -> None:
    settings = {**SAFE, "JOBDIR": tmp_path / "job", "BLOOM_MAX_PAGES_PER_SLOT": MOST}
    assert Crawl.held(tree, 5, tmp_path, settings).interrupt() == 0
    Crawl.held(tree, 3, tmp_path, settings).kill()
    tree.release()
    Crawl.finished(tree.url, tmp_path, settings)
    with closing(sqlite3.connect(tmp_path / "job" / DATABASE)) as db:
        assert db.execute("SELECT queued FROM slots").fetchall() == [(MOST,)]
    assert 0 < len(tree.hits) <= MOST + 1  # the start page does not count
    runs = [log.read_text() for log in tmp_path.glob("crawl-*.log")]
    assert all(run.count(LINE) <= 1 for run in runs)
    assert any(LINE in run for run in runs)
    before = tree.total()
    more = Crawl.finished(tree.url, tmp_path, settings)
    assert tree.total() == before + 1  # the start page, which is never filtered
    assert stat(more, DROPPED) > 0


def test_a_raised_limit_goes_on_from_the_stored_count(wide: Site, tmp_path: Path) -> None:
    settings = {**SAFE, "JOBDIR": tmp_path / "job"}
    Crawl.finished(wide.url, tmp_path, {**settings, "BLOOM_MAX_PAGES_PER_SLOT": MOST})
    wide.forget()
    raised = Crawl.finished(wide.url, tmp_path, {**settings, "BLOOM_MAX_PAGES_PER_SLOT": MOST + 1})
    assert stat(raised, "scheduler/enqueued") == 2  # one page, and the start page
    assert stat(raised, DROPPED) > 0


def test_workers_count_together_and_over_a_restart(wide: Site, tmp_path: Path) -> None:
    crawl = SharedCrawl(wide, tmp_path, BLOOM_MAX_PAGES_PER_SLOT=MANY)
    for worker in crawl.hold(4):
        crawl.interrupt(worker)
    wide.release()
    crawl.finish(crawl.start())
    assert len(wide.hits) == MANY + 1  # the start page does not count
    assert sum(stat(each, DROPPED) for each in crawl.workers) > 0
    assert crawl.our_lines(LINE.replace(str(MOST), str(MANY)))
    assert all(each.output.count(LINE.replace(str(MOST), str(MANY))) <= 1 for each in crawl.workers)
    enqueued = sum(stat(each, "scheduler/enqueued") for each in crawl.workers)
    assert enqueued == MANY + 1
    assert crawl.state().pending == crawl.state().leased == 0


@pytest.mark.parametrize("is_shared", [False, True], ids=["job", "shared"])
def test_a_page_that_was_let_in_is_retried_and_redirected(is_shared: bool, tmp_path: Path) -> None:
    scripted = ScriptedSite({"/": [("/a", "/b", "/d")], "/a": [503, ()], "/b": ["/c"]})
    if is_shared:
        crawl = SharedCrawl(scripted, tmp_path, BLOOM_MAX_PAGES_PER_SLOT=2)
        crawl.finish(crawl.start())
    else:
        settings = {**SAFE, "JOBDIR": tmp_path / "job", "BLOOM_MAX_PAGES_PER_SLOT": 2}
        Crawl.finished(scripted.url, tmp_path, settings)
    scripted.end()
    assert scripted.hits == {"/": 1, "/a": 2, "/b": 1, "/c": 1}


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (SAFE, "without a JOBDIR the queue is in memory"),
        (
            {
                **SAFE,
                "JOBDIR": "job",
                "SCHEDULER_PRIORITY_QUEUE": "scrapy.pqueues.ScrapyPriorityQueue",
            },
            "SCHEDULER_PRIORITY_QUEUE does not tell hosts apart",
        ),
        ({"JOBDIR": "job", "DUPEFILTER_CLASS": BLOOM}, "only the queue of CrashSafeScheduler"),
    ],
)
def test_refused_where_nothing_counts(
    settings: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    settings = {**settings, "BLOOM_MAX_PAGES_PER_SLOT": MOST}
    assert reason in Crawl("data:,", tmp_path, settings).refusal()
