"""A queue and a filter of different ages: every page is crawled, or one line warns."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from scrapy_bloom.job.jobdir import DATABASE
from scrapy_bloom.queues.job_state import read_counts
from tests.support.crawls import Crawl, syncing_every
from tests.support.sites import Site

PAGES = 90
SAFE = {"SCHEDULER": "scrapy_bloom.CrashSafeScheduler", "JOBDIR": "job"}
SHARED = {**SAFE, "BLOOM_DIR": "kept"}
places = pytest.mark.parametrize("settings", [SAFE, SHARED], ids=["own filter", "BLOOM_DIR"])


def queue_files(job: Path) -> list[Path]:
    return sorted(job.glob(f"{DATABASE}*"))


def paused(site: Site, path: Path, settings: dict, answers: int = 30) -> None:
    crawl = Crawl.held(site, answers, path, settings)
    assert crawl.interrupt() == 0, crawl.output


def killed(site: Site, path: Path, settings: dict, answers: int = 30, **options: Path) -> None:
    Crawl.held(site, answers, path, settings, **options).kill()


def restored_from_a_pause(site: Site, path: Path, settings: dict) -> None:
    paused(site, path, settings)
    shutil.copy2(path / "job" / DATABASE, path / "backup")
    paused(site, path, settings)
    (path / "backup").replace(path / "job" / DATABASE)


def removed_after_a_kill(site: Site, path: Path, settings: dict) -> None:
    killed(site, path, settings)
    for file in queue_files(path / "job"):
        file.unlink()


def copied_while_it_ran(site: Site, path: Path, settings: dict) -> None:
    """Copy the job file by file while the crawl runs, and use the copy."""
    crawl = Crawl.held(site, 30, path, settings)
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
@places
def test_one_warning_says_that_queue_and_filter_do_not_fit(
    settings: dict, happens: Callable[[Site, Path, dict], None], tree: Site, tmp_path: Path
) -> None:
    happens(tree, tmp_path, settings)
    is_own = settings is SAFE
    crawl = Crawl.finished(tree.url, tmp_path, settings)
    (line,) = crawl.our_lines("WARNING")
    assert not crawl.our_lines("ERROR")
    assert "nothing is lost" not in crawl.output
    if is_own:
        assert "The crawl starts over with an empty filter" in line
        assert len(tree.hits) == PAGES
        assert list((tmp_path / "job/bloom").glob("*.set-aside-*"))
    else:  # others may use it
        assert "reports them as duplicates" in line or "No page is lost" in line
        assert not list((tmp_path / "kept").glob("*.set-aside-*"))
    crawl = Crawl.finished(tree.url, tmp_path, settings)
    assert not crawl.our_lines("WARNING")  # that was once


@pytest.mark.parametrize("sync_secs", [3600, 0.05], ids=["no checkpoint", "checkpoints"])
@places
def test_the_log_is_removed_after_a_kill(
    settings: dict, sync_secs: float, tree: Site, tmp_path: Path
) -> None:
    """Then the queue is that of SQLite's last checkpoint."""
    tree.delay = 0.02
    killed(tree, tmp_path, settings, 60, spider=syncing_every(sync_secs, tmp_path))
    tree.delay = 0
    (tmp_path / "job" / f"{DATABASE}-wal").unlink()
    before = (tmp_path / "job" / DATABASE).read_bytes()
    crawl = Crawl(tree.url, tmp_path, settings)
    if crawl.finish() == 0:
        warnings = crawl.our_lines("WARNING")
        assert len(warnings) <= 1
        assert len(tree.hits) == PAGES or (warnings and settings is SHARED)
    else:  # since it is not whole
        (line,) = crawl.our_lines("ERROR")
        assert f"{DATABASE} cannot be used" in line
        assert (tmp_path / "job" / DATABASE).read_bytes() == before


@places
def test_a_job_is_moved_after_a_pause(settings: dict, tree: Site, tmp_path: Path) -> None:
    """A move after a clean end needs no warning."""
    paused(tree, tmp_path, settings)
    (tmp_path / "job").rename(tmp_path / "moved")
    pending, in_flight = read_counts(tmp_path / "moved" / DATABASE)
    assert pending > in_flight == 0
    crawl = Crawl.finished(tree.url, tmp_path, {**settings, "JOBDIR": "moved"})
    assert not crawl.our_lines("WARNING") + crawl.our_lines("ERROR")
    assert f"Resuming crawl ({pending} requests scheduled)" in crawl.output
    assert len(tree.hits) == PAGES
    assert sum(tree.hits.values()) - tree.hits["/p/0"] == PAGES - 1


def test_two_jobs_share_a_filter_and_one_of_them_is_killed(tree: Site, tmp_path: Path) -> None:
    """The other job runs in between; neither loses pending requests."""
    other = {**SHARED, "JOBDIR": "other"}
    killed(tree, tmp_path, SHARED, 20)
    killed(tree, tmp_path, other, 20)
    killed(tree, tmp_path, SHARED, 20)
    for job in ("job", "other"):
        assert sum(read_counts(tmp_path / job / DATABASE)) > 0
    for settings in (other, SHARED):
        crawl = Crawl.finished(tree.url, tmp_path, settings)
        assert not crawl.our_lines("WARNING") + crawl.our_lines("ERROR")
    assert len(tree.hits) == PAGES
