"""Kills between each two steps of a checkpoint and of an opening: filter and queue agree."""

import contextlib
import json
import logging
import os
import secrets
import shutil
import signal
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.files.file import FilterFile
from scrapy_bloom.files.log import LogRecord, Overlay
from scrapy_bloom.filters.bloom import BloomFilter
from scrapy_bloom.job.jobdir import DATABASE
from scrapy_bloom.queues.database import JobDatabase
from scrapy_bloom.queues.sqlite_store import SQLiteStore
from scrapy_bloom.queues.store import Taken
from tests.support.local_filters import fps
from tests.support.logged_filters import LoggedFilter

# Before each call of these, and so after the one before, the process dies.
STEPS: list[tuple[Any, str]] = [
    *((os, name) for name in ("fsync", "replace", "rename", "unlink")),
    *((FilterFile, name) for name in ("save", "sync", "close")),
    *((JobDatabase, name) for name in ("begin", "transaction", "sync", "checkpointed", "close")),
    *((SQLiteStore, name) for name in ("_join", "apply")),
    *((Overlay, name) for name in ("take", "applied", "stored")),
    (BloomFilter, "add_hashed"),
    (LogRecord, "write"),
]
OPTIONS = {"capacity": 20, "error_rate": 1e-10}  # some 100,000 pages are asked for
ALL = 80


def die_before_step(number: int) -> None:
    count = 0

    def counted(step: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return step(*args, **kwargs)

        return call

    for owner, name in STEPS:
        setattr(owner, name, counted(getattr(owner, name)))


def story(job: Path, oracle: Path, run: int) -> None:
    """Crawl; each batch is noted before and after it is stored."""
    crawl = LoggedFilter(job, **OPTIONS)
    begin = 40 * run
    with oracle.open("a", buffering=1) as notes:
        taken: list[Taken] = []
        for turn in range(4):
            batch = range(begin + 8 * turn, begin + 8 * turn + 8)
            crawl.find(*fps(batch.start, batch.stop))
            notes.write(json.dumps([*batch]) + "\n")
            crawl.store(done=taken)
            notes.write("stored\n")
            taken = crawl.take(2)
            if turn == 2:
                crawl.checkpoint()
    crawl.close()


def is_killed(job: Path, oracle: Path, run: int, step: int) -> bool:
    """Tell the story in a process that is killed before a step, if there are so many."""
    pid = os.fork()
    if not pid:
        try:
            die_before_step(step)
            story(job, oracle, run)
        except BaseException:  # noqa: BLE001 - the test must not go on twice
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, -signal.SIGKILL)
    return code != 0


def possible(oracle: Path) -> list[set[int]]:
    """The recorded pages: what was being stored is among them, or not."""
    states: list[set[int]] = [set()]
    for line in oracle.read_text().splitlines() if oracle.exists() else []:
        if line == "stored":
            states = states[len(states) // 2 :]
        else:
            batch = set(json.loads(line))
            states = [*states, *(state | batch for state in states)]
    return states


def seen_in(crawl: LoggedFilter) -> set[int]:
    return {number for number, each in enumerate(fps(ALL)) if each in crawl.backend}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="it takes processes that fork")
@pytest.mark.parametrize("part", range(2))
def test_kills_before_each_step(part: int, tmp_path: Path) -> None:
    """Each run takes every second step, from one of the first two on."""
    job, oracle = tmp_path / "job", tmp_path / "oracle"
    for step in range(1 + part + 2 * secrets.randbelow(2), 10_000, 4):
        shutil.rmtree(job, ignore_errors=True)
        oracle.unlink(missing_ok=True)
        was_killed = is_killed(job, oracle, 0, step)
        is_killed(job, oracle, 1, 1 + step * 7 % 60)  # the opening
        for _ in range(1 if step % 5 else 2):
            crawl = LoggedFilter(job, **OPTIONS)
            seen = seen_in(crawl)
            assert seen in possible(oracle), step
            assert crawl.backend.status().count == pytest.approx(len(seen), rel=0.2, abs=3)
            queued = {int.from_bytes(each, "big") for each in crawl.database.unfinished()}
            assert queued <= seen
            crawl.close()
        if not was_killed:
            break
    assert step > 100


def seq_in(path: Path) -> int:
    """The number of the last batch in a database, as it lies there."""
    with contextlib.closing(sqlite3.connect(path)) as db:
        tables = db.execute("SELECT count(*) FROM sqlite_master WHERE name = 'job'")
        if not tables.fetchone()[0]:
            return 0
        (seq,) = db.execute("SELECT seq FROM job").fetchone() or (0,)
    return int(seq)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="it takes processes that fork")
def test_kills_before_each_step_and_the_end_of_the_log_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What only the lost end had is not in the filter, or the crawl says so."""
    job, oracle = tmp_path / "job", tmp_path / "oracle"
    warned = 0
    for step in range(1 + secrets.randbelow(2), 10_000, 2):
        shutil.rmtree(job, ignore_errors=True)
        oracle.write_text("")
        was_killed = is_killed(job, oracle, 0, step)
        (job / f"{DATABASE}-wal").unlink(missing_ok=True)
        seq = seq_in(job / DATABASE) if (job / DATABASE).exists() else 0
        batches = [json.loads(line) for line in oracle.read_text().splitlines() if line != "stored"]
        there = {int(page) for batch in batches[:seq] for page in batch}
        caplog.clear()
        try:
            crawl = LoggedFilter(job, **OPTIONS)
        except StorageError:  # it is not whole
            continue
        if not any(record.levelno == logging.WARNING for record in caplog.records):
            assert seen_in(crawl) <= there, step
        else:
            warned += 1
        crawl.close()
        if not was_killed:
            break
    assert step > 50
    assert warned
