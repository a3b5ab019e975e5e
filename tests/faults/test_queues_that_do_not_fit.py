"""A queue and a filter of different ages: every page is crawled, or one line warns."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from scrapy_bloom.job.jobdir import DATABASE
from tests.support.crawls import Crawl, syncing_every
from tests.support.request_queues import counts_in
from tests.support.sites import Site

PAGES = 90
SAFE = {"SCHEDULER": "scrapy_bloom.CrashSafeScheduler", "JOBDIR": "job"}


def queue_files(job: Path) -> list[Path]:
    return sorted(job.glob(f"{DATABASE}*"))


def paused(site: Site, path: Path, answers: int = 30) -> None:
    crawl = Crawl.held(site, answers, path, SAFE)
    assert crawl.interrupt() == 0, crawl.output


def killed(site: Site, path: Path, answers: int = 30, **options: Path) -> None:
    Crawl.held(site, answers, path, SAFE, **options).kill()


def restored_from_a_pause(site: Site, path: Path) -> None:
    paused(site, path)
    shutil.copy2(path / "job" / DATABASE, path / "backup")
    paused(site, path)
    (path / "backup").replace(path / "job" / DATABASE)


def removed_after_a_kill(site: Site, path: Path) -> None:
    killed(site, path)
    for file in queue_files(path / "job"):
        file.unlink()


def copied_while_it_ran(site: Site, path: Path) -> None:
    """Copy the job file by file while the crawl runs, and use the copy."""
    crawl = Crawl.held(site, 30, path, SAFE)
    shutil.copytree(path / "job", path / "copy", ignore=shutil.ignore_patterns(f"{DATABASE}*"))
    site.hold_after(30)
    crawl.wait_until(site.is_holding)
    crawl.stop()
    for file in queue_files(path / "job"):
        shutil.copy2(file, path / "copy")
    crawl.kill()
    shutil.rmtree(path / "job")
    (path / "copy").rename(path / "job")


@pytest.mark.parametrize(
    "happens",
    [restored_from_a_pause, removed_after_a_kill, copied_while_it_ran],
    ids=lambda happens: happens.__name__,
)
def test_one_warning_says_that_queue_and_filter_do_not_fit(
    happens: Callable[[Site, Path], None], tree: Site, tmp_path: Path
) -> None:
    happens(tree, tmp_path)
    crawl = Crawl.finished(tree.url, tmp_path, SAFE)
    (line,) = crawl.our_lines("WARNING")
    assert not crawl.our_lines("ERROR")
    assert "nothing is lost" not in crawl.output
    assert "The crawl starts over with an empty filter" in line
    assert len(tree.hits) == PAGES
    assert list((tmp_path / "job/bloom").glob("*.set-aside-*"))
    crawl = Crawl.finished(tree.url, tmp_path, SAFE)
    (line,) = crawl.our_lines("WARNING")  # that was once
    assert "ended at" in line


@pytest.mark.parametrize("sync_secs", [3600, 0.05], ids=["no checkpoint", "checkpoints"])
def test_the_log_is_removed_after_a_kill(sync_secs: float, tree: Site, tmp_path: Path) -> None:
    """Then the queue is that of SQLite's last checkpoint."""
    tree.delay = 0.02
    killed(tree, tmp_path, 60, spider=syncing_every(sync_secs, tmp_path))
    tree.delay = 0
    (tmp_path / "job" / f"{DATABASE}-wal").unlink()
    before = (tmp_path / "job" / DATABASE).read_bytes()
    crawl = Crawl(tree.url, tmp_path, SAFE)
    if crawl.finish() == 0:
        warnings = crawl.our_lines("WARNING")
        assert len(warnings) <= 1
        assert len(tree.hits) == PAGES
    else:  # since it is not whole
        (line,) = crawl.our_lines("ERROR")
        assert f"{DATABASE} cannot be used" in line
        assert (tmp_path / "job" / DATABASE).read_bytes() == before


def test_a_job_is_moved_after_a_pause(tree: Site, tmp_path: Path) -> None:
    """A move after a clean end needs no warning."""
    paused(tree, tmp_path)
    (tmp_path / "job").rename(tmp_path / "moved")
    pending, in_flight = counts_in(tmp_path / "moved" / DATABASE)
    assert pending > in_flight == 0
    crawl = Crawl.finished(tree.url, tmp_path, {**SAFE, "JOBDIR": "moved"})
    assert not crawl.our_lines("WARNING") + crawl.our_lines("ERROR")
    assert f"Resuming crawl ({pending} requests scheduled)" in crawl.output
    assert len(tree.hits) == PAGES
    assert sum(tree.hits.values()) - tree.hits["/p/0"] == PAGES - 1
