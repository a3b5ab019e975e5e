"""A queue and a filter of different ages: every page is crawled, or one line warns."""

from pathlib import Path

import pytest

from scrapy_bloom.job.jobdir import FILE
from tests.support.crawls import Crawl, syncing_every
from tests.support.request_queues import counts_in
from tests.support.sites import Site

PAGES = 50
SAFE = {"SCHEDULER": "scrapy_bloom.CrashSafeScheduler", "JOBDIR": "job"}


@pytest.mark.parametrize("sync_secs", [3600, 0.05], ids=["no checkpoint", "checkpoints"])
def test_the_log_is_removed_after_a_kill(sync_secs: float, tree: Site, tmp_path: Path) -> None:
    """Then the queue is that of SQLite's last checkpoint."""
    tree.delay = 0.02
    Crawl.held(tree, 30, tmp_path, SAFE, spider=syncing_every(sync_secs, tmp_path)).kill()
    tree.delay = 0
    (tmp_path / "job" / f"{FILE}-wal").unlink()
    before = (tmp_path / "job" / FILE).read_bytes()
    crawl = Crawl(tree.url, tmp_path, SAFE)
    if crawl.finish() == 0:
        warnings = crawl.our_lines("WARNING")
        assert len(warnings) <= 1
        assert len(tree.hits) == PAGES
    else:  # since it is not whole
        (line,) = crawl.our_lines("ERROR")
        assert f"{FILE} cannot be used" in line
        assert (tmp_path / "job" / FILE).read_bytes() == before


def test_a_job_is_moved_after_a_pause(tree: Site, tmp_path: Path) -> None:
    assert Crawl.held(tree, 15, tmp_path, SAFE).interrupt() == 0
    (tmp_path / "job").rename(tmp_path / "moved")
    pending, in_flight = counts_in(tmp_path / "moved" / FILE)
    assert pending > in_flight == 0
    crawl = Crawl.finished(tree.url, tmp_path, {**SAFE, "JOBDIR": "moved"})
    assert not crawl.our_lines("WARNING") + crawl.our_lines("ERROR")
    assert f"Resuming crawl ({pending} requests scheduled)" in crawl.output
    assert len(tree.hits) == PAGES
    assert sum(tree.hits.values()) - tree.hits["/p/0"] == PAGES - 1
