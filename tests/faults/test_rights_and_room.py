"""Files that may not be written, paths that are too long, full disks: the file, and what to do."""

import os
from pathlib import Path

import pytest

from scrapy_bloom.job.disk import log_and_index
from tests.support.cli import bloom
from tests.support.crawls import BLOOM, Crawl, unprivileged
from tests.support.disks import Disk, mounted
from tests.support.sites import Site
from tests.support.workspace import fingerprints, make_filter, urls, write_urls

PAGES = 90
JOB = {"JOBDIR": "job", "SCHEDULER": "scrapy_bloom.CrashSafeScheduler"}


@pytest.mark.parametrize("which", range(4), ids=["database", "log", "index", "directory"])
def test_a_queue_that_is_not_writable_is_left_as_it_is(
    which: int, tree: Site, tmp_path: Path
) -> None:
    """SQLite would make files next to it that nobody may write to, and no later run could begin."""
    assert Crawl.held(tree, 10, tmp_path, JOB).interrupt() == 0
    database = tmp_path / "job/requests.sqlite"
    file = (database, *log_and_index(database), database.parent)[which]
    file.touch()
    mode = file.stat().st_mode
    file.chmod(mode & 0o555)
    tree.release()
    before = sorted(each.name for each in database.parent.iterdir())
    for _ in range(2):
        line = Crawl(tree.url, tmp_path, JOB, prefix=unprivileged()).refusal()
        assert f"{file.name} is not writable; nothing was changed: allow this user" in line
        assert sorted(each.name for each in database.parent.iterdir()) == before
    file.chmod(mode)
    Crawl.finished(tree.url, tmp_path, JOB, prefix=unprivileged())
    assert len(tree.hits) == PAGES


def test_a_queue_that_cannot_be_read_is_not_taken_for_none(tree: Site, tmp_path: Path) -> None:
    """The filter would report its pending requests as duplicates."""
    assert Crawl.held(tree, 10, tmp_path, JOB).interrupt() == 0
    database = tmp_path / "job/requests.sqlite"
    database.rename(tmp_path / "kept")
    database.mkdir()  # root may read all files, but no directory as a file
    expected = "requests.sqlite cannot be read: Is a directory"
    for command in ("info", "queue"):
        assert expected in bloom(command, "job", cwd=tmp_path).error
    for settings in (JOB, {"JOBDIR": "job"}):
        assert "requests.sqlite cannot be " in Crawl(tree.url, tmp_path, settings).refusal()


def test_a_path_that_is_too_long_for_sqlite(tree: Site, tmp_path: Path) -> None:
    job = Path("/".join(["x" * 60] * 8))
    length = len(os.fsencode(tmp_path / job / "requests.sqlite"))
    line = Crawl(tree.url, tmp_path, {**JOB, "JOBDIR": job}).refusal()
    assert f"its path has {length} bytes, and SQLite can open a path of up to 504" in line
    assert "set JOBDIR to a directory with a shorter path" in line
    short = Path(str(job)[: 504 - length])
    Crawl.finished(tree.url, tmp_path, {**JOB, "JOBDIR": short})


@pytest.mark.parametrize("what", ["crawl", "import", "report", "add", "copy"])
def test_a_full_disk(what: str, tree: Site, tmp_path: Path) -> None:
    with mounted(Disk, tmp_path / "small") as disk:
        make_filter(tmp_path / "filter", fingerprints(urls(range(50))))
        write_urls(tmp_path / "urls", urls(range(50)))
        settings = {**JOB, "JOBDIR": disk.path / "job"}
        assert Crawl.held(tree, 10, tmp_path, settings).interrupt() == 0
        (disk.path / "new").mkdir()  # Scrapy makes it, and does not expect a full disk
        disk.fill()
        place = disk.path / "job/requests.added"
        if what == "crawl":
            place = disk.path / "new/bloom"
            error = Crawl(tree.url, tmp_path, {**JOB, "JOBDIR": disk.path / "new"}).refusal()
        else:
            if what == "import":
                place = disk.path / "other"
                options = ["urls", place]
            elif what == "copy":
                place = disk.path / "other"
                options = ["filter", place]
            elif what == "report":
                place = disk.path / "page.html"
                options = ["filter", "-o", place]
            else:
                options = [disk.path / "job", "urls"]
            project = ("-s", f"DUPEFILTER_CLASS={BLOOM}")
            ran = bloom(what, *map(str, options), *project, cwd=tmp_path)
            assert ran.status == 1, ran
            error = ran.error
        assert str(place) in error
        assert "No space left on device" in error
        assert "free some space" in error
        assert "allow" not in error
        assert len(error.splitlines()) == 1
