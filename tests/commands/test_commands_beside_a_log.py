"""Commands that touch the directory of a filter whose log is the queue of a job."""

from pathlib import Path

import pytest

from scrapy_bloom.files.file import FilterFile
from scrapy_bloom.files.log import LOGS_NAME, LogRecords
from tests.support import servers
from tests.support.cli import bloom
from tests.support.logged_filters import LoggedFilter
from tests.support.workspace import FINGERPRINTER, fingerprints, make_filter, urls, write_urls

PAGES = fingerprints(urls(range(60)))
OPTIONS = {"fingerprinter": FINGERPRINTER, "error_rate": 1e-6}


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A job that is paused: pages 0 to 39 are recorded, and 20 of them queued."""
    crawl = LoggedFilter(tmp_path / "job", **OPTIONS)
    crawl.find(*PAGES[:40])
    crawl.store()
    crawl.crawl(20)
    crawl.close()
    write_urls(tmp_path / "more.txt", urls(range(30, 60)))
    return tmp_path / "job"


def test_an_import_into_a_paused_job(job: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert bloom("import", "more.txt", "job", cwd=job.parent).status == 0
    crawl = LoggedFilter(job, **OPTIONS)
    assert all(each in crawl.backend for each in PAGES)
    assert crawl.database.resumed == 20
    crawl.close()
    assert not caplog.messages


def test_a_reset_leaves_nothing_over(job: Path, caplog: pytest.LogCaptureFixture) -> None:
    (job / f"bloom/{LOGS_NAME}.tmp").touch()
    assert bloom("reset", "job", "--yes", cwd=job.parent).status == 0
    assert {each.name for each in (job / "bloom").iterdir()} == {"lock"}
    crawl = LoggedFilter(job, **OPTIONS)
    (message,) = caplog.messages
    assert "the filter lacks requests that" in message
    assert "No page is lost" in message
    queued = set(crawl.database.unfinished())
    assert len(queued) == 20
    assert {each for each in PAGES if each in crawl.backend} == queued
    crawl.close()


def test_a_copy_has_no_records(job: Path) -> None:
    place = f"{servers.shared('valkey').url}#{job}"
    for command in (["job/bloom", place], [place, "one"], ["job", "two"], [place, "job", "three"]):
        ran = bloom("copy", *command, cwd=job.parent)
        assert ran.status == 0, ran
    for name in ("one", "two", "three"):
        assert LogRecords.read(job.parent / name / "bloom") == LogRecords()
        recorded = bloom("info", name, "--json", cwd=job.parent).json["recorded"]
        assert recorded == pytest.approx(40, abs=1 if name == "three" else 0)


@pytest.mark.parametrize("is_cut_off", [False, True])
def test_a_filter_that_lacks_what_its_log_has_is_not_copied(is_cut_off: bool, job: Path) -> None:
    """After a power cut, the header may be as it was before the crawl."""
    crawl = LoggedFilter(job, **OPTIONS)
    crawl.find(*PAGES[40:50])
    crawl.store()
    if is_cut_off:
        for file in crawl.backend.live:
            assert isinstance(file, FilterFile)
            file.in_use = False
            file.save()
    crawl.die()
    before = (job / "bloom/generation-0001.bloom").read_bytes()
    make_filter(job.parent / "other", PAGES)
    server = servers.shared("valkey").url
    for command in (
        ["copy", "job/bloom", server, "--key", str(job)],
        ["copy", "job", "copy"],
        ["copy", "other", "job", "copy"],
        ["import", "more.txt", "job"],
    ):
        ran = bloom(*command, cwd=job.parent)
        assert ran.status == 1, command
        assert "did not close it" in ran.error
    assert (job / "bloom/generation-0001.bloom").read_bytes() == before
    crawl = LoggedFilter(job, **OPTIONS)
    assert all(each in crawl.backend for each in PAGES[:50])
    crawl.close()
    assert bloom("copy", "job", "copy", cwd=job.parent).status == 0


def test_records_that_are_damaged_stop_who_would_change_the_filter(job: Path) -> None:
    (job / "bloom" / LOGS_NAME).write_text("{")
    for command in (["import", "more.txt", "job"], ["copy", "job", "copy"]):
        assert f"{LOGS_NAME} cannot be read" in bloom(*command, cwd=job.parent).error
    assert bloom("check", "job", "more.txt", cwd=job.parent).status == 0
    assert bloom("reset", "job", "--yes", cwd=job.parent).status == 0
