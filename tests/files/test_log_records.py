"""A filter and a log that do not fit are detected, and never used without a warning."""

import json
import logging
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from scrapy_bloom import StorageError
from scrapy_bloom.files.log import RECORD_NAME
from tests.support.local_filters import fps, left_by_a_kill
from tests.support.logged_filters import LoggedFilter

OLDER, NEWER = "is older than the filter", "the filter is older than"
LACKS, OTHER = (
    "the filter lacks requests that",
    "is not the queue that the filter was last used with",
)
COPY = f"(was copied or moved while a crawl used it, or after it was killed|{OLDER})"


class Job:
    """A job of 60 pages whose crawl was paused twice, and the copies of its first pause.

    Pages 0 to 39 were found before the first pause, and 20 of them were crawled; the others after
    it, when 20 more were crawled.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.filter = path / "bloom"
        self.database = path / "requests.sqlite"
        crawl = self.open()
        crawl.find(*fps(40))
        crawl.store()
        crawl.crawl(20)
        crawl.close()
        self.old = path.with_name("old")
        shutil.copytree(self.filter, self.old / "bloom")
        shutil.copy(self.database, self.old)
        crawl = self.open()
        crawl.find(*fps(40, 60))
        crawl.store()
        crawl.crawl(20)
        crawl.close()

    def open(self) -> LoggedFilter:
        return LoggedFilter(self.path)

    def restore_database(self) -> None:
        shutil.copy(self.old / "requests.sqlite", self.database)

    def restore_filter(self) -> None:
        shutil.rmtree(self.filter)
        shutil.copytree(self.old / "bloom", self.filter)

    def remove_database(self) -> None:
        self.database.unlink()

    def empty_database(self) -> None:
        os.truncate(self.database, 0)

    def remove_filter(self) -> None:
        shutil.rmtree(self.filter)

    def replace_filter(self) -> None:
        self.remove_filter()
        another = self.path.with_name("another")
        LoggedFilter(another).close()
        shutil.copytree(another / "bloom", self.filter)
        (self.filter / RECORD_NAME).unlink()

    def other_job(self) -> None:
        other = LoggedFilter(self.path.with_name("another"))
        other.find(*fps(100, 110))
        other.close()
        shutil.copy(self.path.with_name("another") / "requests.sqlite", self.database)

    def copy_while_open(self) -> None:
        crawl = self.open()
        crawl.find(*fps(60, 80))
        crawl.store()
        copy = self.path.with_name("copy")
        copy.mkdir()
        for name in ("requests.sqlite", "requests.sqlite-wal"):
            shutil.copy(self.path / name, copy)
        crawl.find(*fps(80, 90))
        crawl.close()
        for name in ("requests.sqlite", "requests.sqlite-wal"):
            (self.path / name).unlink(missing_ok=True)
            shutil.copy(copy / name, self.path / name)

    def kill_without_log(self) -> None:
        left_by_a_kill(self.filter)


# What is done to a job, what the log says about it, and whether the queue may lack requests.
MISFITS: dict[str, tuple[Callable[[Job], None], str, bool]] = {
    "an older queue": (Job.restore_database, OLDER, True),
    "no queue": (Job.remove_database, OTHER, True),
    "an empty queue": (Job.empty_database, OTHER, True),
    "the queue of another job": (Job.other_job, OTHER, True),
    "a queue copied while open": (Job.copy_while_open, COPY, True),
    "an older filter": (Job.restore_filter, NEWER, False),
    "no filter": (Job.remove_filter, LACKS, False),
    "another filter": (Job.replace_filter, LACKS, False),
    "a filter that was left in use": (Job.kill_without_log, "did not close .*-0001.bloom", True),
}


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path / "job")


@pytest.mark.parametrize("name", MISFITS)
def test_a_misfit(name: str, job: Job, caplog: pytest.LogCaptureFixture) -> None:
    change, why, is_log_older = MISFITS[name]
    change(job)
    caplog.clear()
    crawl = job.open()
    (message,) = [each for each in caplog.records if each.levelno >= logging.WARNING]
    text = message.getMessage()
    assert re.search(why, text)
    assert "nothing is lost" not in text
    assert ("Set aside, not deleted" in text) is is_log_older
    moved = list(job.filter.glob("*.set-aside-*"))
    assert bool(moved) is is_log_older
    assert not list(job.path.glob("requests.sqlite.set-aside-*"))
    # Queued requests are crawled once, and lost requests are new, unless a message says otherwise.
    queued = set(crawl.database.unfinished())
    assert not queued & {each for each in queued if each not in crawl.backend}
    seen = {each for each in fps(80) if each in crawl.backend}
    if is_log_older:
        assert seen == queued & set(fps(80))
    else:
        assert "No page is lost" in text
        assert queued <= seen
    crawl.close()
    # From then on, they belong together.
    caplog.clear()
    with caplog.at_level("INFO"):
        job.open().close()
    assert not caplog.messages


def test_a_new_queue_after_a_finished_crawl_is_no_misfit(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    crawl = job.open()
    crawl.crawl(100)
    crawl.close()
    job.remove_database()
    crawl = job.open()
    assert all(each in crawl.backend for each in fps(60))
    crawl.close()
    assert not caplog.messages


def test_a_queue_that_was_swapped_and_is_put_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What the other one held in the meantime is missing then."""
    job = Job(tmp_path / "job")
    first = tmp_path / "first"
    job.database.rename(first)
    crawl = job.open()
    crawl.find(*fps(60, 70))
    crawl.close()
    job.database.unlink()
    first.rename(job.database)
    caplog.clear()
    job.open().close()
    assert OTHER in caplog.text


RECORD = {"id": "a", "run": "ab", "seq": 1, "left": 0, "is_open": False}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"[" * 20_000,
        b'{"id": "a"}',
        *(
            json.dumps({**RECORD, **change}).encode()
            for change in (
                {"seq": "1"},
                {"left": True},
                {"run": ["a"]},
                {"run": "\ud800"},
                {"is_open": "a"},
                {"more": 1},
            )
        ),
        b'{"id": "a", "run": "", "seq": ' + b"9" * 5000 + b', "left": 0, "is_open": false}',
    ],
    ids=lambda content: content[:60].decode(errors="replace"),
)
def test_records_that_are_damaged(content: bytes, tmp_path: Path) -> None:
    LoggedFilter(tmp_path).close()
    path = tmp_path / "bloom" / RECORD_NAME
    path.write_bytes(content)
    with pytest.raises(
        StorageError, match=f"{RECORD_NAME} cannot be read: .*; it was left as it is"
    ):
        LoggedFilter(tmp_path)
    assert path.read_bytes() == content


def test_setting_aside_that_was_interrupted_is_completed_by_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(tmp_path / "job")
    number = 0
    while True:
        number += 1
        shutil.rmtree(tmp_path / "copy", ignore_errors=True)
        shutil.copytree(job.path, tmp_path / "copy")
        job.restore_database()
        rename, renames = Path.rename, []

        def dies(path: Path, target: Path) -> Path:
            renames.append(path)  # noqa: B023 - of this turn
            if len(renames) == number:  # noqa: B023
                raise KeyboardInterrupt
            return rename(path, target)  # noqa: B023

        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", dies)
            try:
                job.open().close()
            except KeyboardInterrupt:
                is_through = False
            else:
                is_through = True
        crawl = job.open()
        queued = set(crawl.database.unfinished())
        assert {each for each in fps(60) if each in crawl.backend} == queued
        crawl.close()
        shutil.rmtree(job.path)
        shutil.copytree(tmp_path / "copy", job.path)
        if is_through:
            break
    assert number > 2
