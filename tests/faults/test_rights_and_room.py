"""Files that may not be written, paths that are too long, full disks: the file, and what to do."""

import os
from pathlib import Path

import pytest

from scrapy_bloom.job.disk import log_and_index
from tests.support.cli import bloom
from tests.support.crawls import BLOOM, Crawl, unprivileged
from tests.support.disks import Disk, mounted
from tests.support.sites import Site
from tests.support.workspace import contents_but_index, fingerprints, make_filter, urls, write_urls

PAGES = 30
JOB = {"JOBDIR": "job", "SCHEDULER": "scrapy_bloom.CrashSafeScheduler"}


@pytest.mark.parametrize("which", range(4), ids=["database", "log", "index", "directory"])
def test_a_queue_that_is_not_writable_is_left_as_it_is(
    which: int, tree: Site, tmp_path: Path
) -> None:
    """SQLite would make files next to it that nobody may write to, and no later run could begin."""
    assert Crawl.held(tree, 10, tmp_path, JOB).interrupt() == 0
    database = tmp_path / "job/bloom.sqlite"
    file = (database, *log_and_index(database), database.parent)[which]
    file.touch()
    mode = file.stat().st_mode
    file.chmod(mode & 0o555)
    tree.release()
    before = sorted(each_file.name for each_file in database.parent.iterdir())
    line = Crawl(tree.url, tmp_path, JOB, prefix=unprivileged()).refusal()
    what = "is not writable; nothing was changed: allow this user"
    if file.is_dir():
        what = "cannot be written to: Permission denied; allow this user to write there"
    assert f"{file.name} {what}" in line
    assert sorted(each_file.name for each_file in database.parent.iterdir()) == before
    file.chmod(mode)
    Crawl.finished(tree.url, tmp_path, JOB)
    assert len(tree.hits) == PAGES


def test_a_queue_that_cannot_be_read_is_not_taken_for_none(tree: Site, tmp_path: Path) -> None:
    """The filter would report its pending requests as duplicates."""
    assert Crawl.held(tree, 10, tmp_path, JOB).interrupt() == 0
    database = tmp_path / "job/bloom.sqlite"
    database.rename(tmp_path / "kept")
    database.mkdir()  # root may read all files, but no directory as a file
    expected = "bloom.sqlite cannot be read: Is a directory"
    for command in ("info", "queue"):
        assert expected in bloom(command, "job", cwd=tmp_path).error
    for settings in (JOB, {"JOBDIR": "job"}):
        assert "bloom.sqlite cannot be " in Crawl(tree.url, tmp_path, settings).refusal()


@pytest.mark.parametrize("state", ["closed", "running", "killed", "without its index"])
def test_commands_that_read_change_no_file(state: str, tree: Site, tmp_path: Path) -> None:
    """They need no right to write; only a log without an index cannot be read without one."""
    job = tmp_path / "job"
    crawl = Crawl.held(tree, 10, tmp_path, JOB)
    if state == "closed":
        assert crawl.interrupt() == 0
    elif state == "running":
        crawl.stop()
    else:
        crawl.kill()
    index = log_and_index(job / "bloom.sqlite")[1]
    if state == "without its index":
        index.unlink()
    commands = ["info job --scan", "queue job"]
    before = contents_but_index(job)
    for mode in (0o555, 0o755)[: 1 + (not index.exists())]:
        job.chmod(mode)
        for command in commands:
            ran = bloom(*command.split(), cwd=tmp_path, under=unprivileged())
            if state == "without its index" and mode == 0o555:
                what = "bloom.sqlite-wal cannot be read without bloom.sqlite-shm, which cannot be"
                assert what in ran.error
            else:
                assert ran.status == 0, ran
            if state == "without its index" and mode == 0o755:
                index.unlink()  # which SQLite makes
            assert contents_but_index(job) == before, command


def test_a_path_that_is_too_long_for_sqlite(tree: Site, tmp_path: Path) -> None:
    job = Path("/".join(["x" * 60] * 8))
    length = len(os.fsencode(tmp_path / job / "bloom.sqlite"))
    line = Crawl(tree.url, tmp_path, {**JOB, "JOBDIR": job}).refusal()
    assert f"its path has {length} bytes, and SQLite can open a path of up to 500" in line
    assert "set JOBDIR to a directory with a shorter path" in line
    short = Path(str(job)[: 500 - length])
    Crawl.finished(tree.url, tmp_path, {**JOB, "JOBDIR": short})


FULL = {  # command, and the path that its error names
    "import": (["import", "urls", "disk/other"], "disk/other"),
    "copy": (["copy", "filter", "disk/other"], "disk/other"),
    "report": (["report", "filter", "-o", "disk/page.html"], "disk/page.html"),
    "add": (["add", "disk/job", "urls"], "disk/job/inbox.sqlite"),
}


@pytest.mark.parametrize("what", ["crawl", *FULL])
def test_a_full_disk(what: str, tree: Site, tmp_path: Path) -> None:
    with mounted(Disk, tmp_path) as disk:
        make_filter(tmp_path / "filter", fingerprints(urls(range(50))))
        write_urls(tmp_path / "urls", urls(range(50)))
        assert Crawl.held(tree, 10, tmp_path, {**JOB, "JOBDIR": "disk/job"}).interrupt() == 0
        (disk.path / "new").mkdir()  # Scrapy makes it, and does not expect a full disk
        disk.fill()
        if what == "crawl":
            place = "disk/new"
            error = Crawl(tree.url, tmp_path, {**JOB, "JOBDIR": place}).refusal()
        else:
            command, place = FULL[what]
            error = bloom(*command, "-s", f"DUPEFILTER_CLASS={BLOOM}", cwd=tmp_path).error
        assert place in error
        assert any(why in error for why in ("No space left", "disk is full", "disk I/O error"))
        assert "free some space" in error
        assert "allow" not in error
