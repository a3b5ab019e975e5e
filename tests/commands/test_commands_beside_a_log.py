"""Commands that touch the directory of a filter whose log is the queue of a job."""

from contextlib import closing
from pathlib import Path

import pytest

from scrapy_bloom.files.file import FilterFile
from scrapy_bloom.files.log import RECORD_NAME
from scrapy_bloom.queues.store import Entered, State
from tests.support import servers
from tests.support.cli import bloom
from tests.support.request_queues import done, enter, taken
from tests.support.stores import InFiles
from tests.support.workspace import FINGERPRINTER, fingerprints, urls, write_urls

PAGES = fingerprints(urls(range(60)))
OPTIONS = {"fingerprinter": FINGERPRINTER, "error_rate": 1e-6}


def opened(job: Path) -> InFiles:
    crawl = InFiles(job, **OPTIONS)
    crawl.open()
    return crawl


def entered(page: bytes) -> Entered:
    return Entered(page, page)


def recorded(crawl: InFiles) -> set[bytes]:
    return {each for each in PAGES if crawl.store.knows(each)}


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A job that is paused: pages 0 to 39 are recorded, and 20 of them queued."""
    store = opened(tmp_path / "job").store
    enter(store, *map(entered, PAGES[:40]))
    for _ in range(20):
        done(store, taken(store))
    store.close()
    write_urls(tmp_path / "more.txt", urls(range(30, 60)))
    return tmp_path / "job"


def test_an_import_into_a_paused_job(job: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert bloom("import", "more.txt", "job", cwd=job.parent).status == 0
    crawl = opened(job)
    assert recorded(crawl) == set(PAGES)
    assert crawl.opened.counts[State.PENDING] == 20
    crawl.close()
    assert not caplog.messages


@pytest.mark.parametrize("is_cut_off", [False, True])
def test_a_filter_that_lacks_what_its_log_has_is_not_copied(is_cut_off: bool, job: Path) -> None:
    """After a power cut, the header may be as it was before the crawl."""
    crawl = opened(job)
    enter(crawl.store, *map(entered, PAGES[40:50]))
    crawl.die()
    if is_cut_off:
        with closing(FilterFile.open(job / "bloom/generation-0001.bloom")) as file:
            file.in_use = False
            file.save()
    before = (job / "bloom/generation-0001.bloom").read_bytes()
    server = servers.shared("valkey").url
    for command in (
        ["copy", "job/bloom", server, "--key", str(job)],
        ["copy", "job", "copy"],
        ["import", "more.txt", "job"],
    ):
        ran = bloom(*command, cwd=job.parent)
        assert ran.status == 1, command
        assert "did not close it" in ran.error
    assert (job / "bloom/generation-0001.bloom").read_bytes() == before
    crawl = opened(job)
    assert recorded(crawl) >= set(PAGES[:50])
    crawl.close()
    assert bloom("copy", "job", "copy", cwd=job.parent).status == 0


def test_a_record_that_is_damaged_stops_who_would_change_the_filter(job: Path) -> None:
    (job / "bloom" / RECORD_NAME).write_text("{")
    for command in (["import", "more.txt", "job"], ["copy", "job", "copy"]):
        assert f"{RECORD_NAME} cannot be read" in bloom(*command, cwd=job.parent).error
    assert bloom("check", "job", "more.txt", cwd=job.parent).status == 0
    assert bloom("reset", "job", "--yes", cwd=job.parent).status == 0
