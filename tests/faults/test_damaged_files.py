"""Damaged files: the error names the file, and nothing changes it."""

import random
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from scrapy_bloom import StorageError
from scrapy_bloom.job.disk import log_and_index
from scrapy_bloom.job.reader import FilterReader
from tests.support import request_queues
from tests.support.backends import local_backend
from tests.support.cli import bloom
from tests.support.crawls import Crawl
from tests.support.request_queues import SHOP, page, take
from tests.support.sites import Site
from tests.support.stores import InFiles
from tests.support.workspace import fingerprints, make_filter, urls, write_urls

PAGES = 40
SEED = 2026
SAFE = "scrapy_bloom.CrashSafeScheduler"
OPTIONS = {"capacity": 40, "error_rate": 1e-6}
RECORDED = [b"page %d" % number for number in range(90)]


def contents(directory: Path) -> dict[str, bytes]:
    """Return what files have, but for the index of a log, which is made again."""
    files = (file for file in directory.iterdir() if not file.name.endswith("-shm"))
    return {file.name: file.read_bytes() for file in files}


def change(path: Path, statement: str) -> None:
    with closing(sqlite3.connect(path)) as db, db:
        db.execute(statement)


def touch(job: Path) -> None:
    """Use a filter as a crawl does that ends with its first request."""
    backend = local_backend(job, fingerprinter="a.B", **OPTIONS)
    backend.open()
    try:
        assert all(entry in backend for entry in RECORDED)
    finally:
        backend.close()


def read(job: Path) -> None:
    with closing(FilterReader(job / "bloom.sqlite")) as reader:
        assert all(reader.are_seen(RECORDED))


def resume(job: Path) -> None:
    """Use a queue with its filter."""
    store = InFiles(job, fingerprinter="a.B", **OPTIONS).make()
    store.open(SHOP)
    try:
        request_queues.enter(store, page("new"))
    finally:
        store.close()


USES = [touch, read, resume]


def check_refused(use: Callable[[Path], None], job: Path, what: str) -> str:
    """Check that a use fails with the line that a user needs, and changes nothing."""
    before = contents(job)
    with pytest.raises(StorageError) as raised:
        use(job)
    message = str(raised.value)
    assert message.startswith(f"{job}/bloom.sqlite "), f"{what}: {message}"
    assert "it was left as it is" in message or "Upgrade scrapy_bloom" in message, what
    assert "\n" not in message, what
    assert contents(job) == before, f"{what}: a file was changed"
    return message


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A job whose filter has two generations, with a queue."""
    path = tmp_path / "job"
    backend = local_backend(path, fingerprinter="a.B", **OPTIONS)
    backend.open()
    backend.add_many(RECORDED)
    backend.close()
    resume(path)
    return path


# Figures that cannot be; a hostile program writes them, too.
FIGURES = {
    "num_hashes": ["0", "1", "65", "65535", "-1", "'a'", "NULL"],
    "num_blocks": ["0", "-1", "3", "1000", f"{2**40}", f"{2**63 - 1}", "1.5"],
    "capacity": ["0", "-1", "1e12", "1e13", "9e999", "x''"],
    "error_rate": ["9e999", "-9e999", "0", "-1", "1", "1e-300", "1e-19", "1e300", "NULL"],
    "first_run": ["9e999", "-9e999", "-1", "1e300", "1e12", "'today'"],
    "last_run": ["9e999", "-1", "1e300"],
    "count": ["-1", f"{10**7}", f"{2**62}", "'many'"],
    "number": ["0", "-1", f"{2**62}"],
}
DAMAGES = {
    *(
        f"UPDATE generations SET {name} = {value} WHERE number = 2"
        for name, values in FIGURES.items()
        for value in values
    ),
    *(
        f"UPDATE filter SET {assignment}"
        for assignment in ("hash_scheme = 9", "salt = x'00'", "salt = NULL", "error_rate = 7")
    ),
    *(f"UPDATE filter SET {name} = NULL" for name in ("fingerprinter", "spider", "sample")),
    *("DELETE FROM job", "UPDATE job SET opened_as = NULL", "UPDATE job SET opened_as = x'00'"),
    *(
        f"INSERT INTO ops VALUES (1, {values})"
        for values in ("1, x'0000'", "1, x'ffffffff00'", "'a', x''", "1, NULL")
    ),
    *("PRAGMA user_version = 2", "PRAGMA application_id = 5"),
}


@pytest.mark.parametrize("use", USES)
def test_every_damage_of_the_figures_is_refused(use: Callable[[Path], None], job: Path) -> None:
    path = job / "bloom.sqlite"
    good = path.read_bytes()
    for damage in sorted(DAMAGES):
        for entry in log_and_index(path):
            entry.unlink(missing_ok=True)
        path.write_bytes(good)
        change(path, damage)
        check_refused(use, job, damage)
    path.write_bytes(good)
    use(job)


@pytest.mark.parametrize(("bits", "scheduler"), [("x'00'", None), ("NULL", SAFE)])
def test_a_damaged_block_ends_the_crawl(
    bits: str, scheduler: str | None, tree: Site, tmp_path: Path
) -> None:
    """Without a filter, the crawl might never end; when the block is restored, it goes on."""
    settings = {"JOBDIR": "job", "SCHEDULER": scheduler}
    assert Crawl.held(tree, 12, tmp_path, settings).interrupt() == 0
    path = tmp_path / "job/bloom.sqlite"
    with closing(sqlite3.connect(path)) as db, db:
        kept = db.execute("SELECT * FROM blocks").fetchall()
        db.execute(f"UPDATE blocks SET bits = {bits}")
    assert "is damaged" in bloom("info", "job", "--scan", cwd=tmp_path).error
    crawl = Crawl.finished(tree.url, tmp_path, settings)
    (error,) = crawl.our_lines("ERROR")
    assert "bloom.sqlite cannot be used: block " in error
    assert "is damaged; it was left as it is. If it is damaged, restore it from a" in error
    reason = "bloom_queue_failed" if scheduler else "bloom_outage"
    assert f"'finish_reason': '{reason}'" in crawl.output
    assert len(tree.hits) < PAGES
    with closing(sqlite3.connect(path)) as db, db:
        db.executemany("INSERT OR REPLACE INTO blocks VALUES (?, ?, ?)", kept)
    Crawl.finished(tree.url, tmp_path, settings)
    assert len(tree.hits) == PAGES


def test_a_crawl_and_each_subcommand_are_refused_in_one_line(tree: Site, tmp_path: Path) -> None:
    path = make_filter(tmp_path / "job", fingerprints(urls(range(9)))) / "bloom.sqlite"
    change(path, "UPDATE generations SET error_rate = 9e999")
    before = path.read_bytes()
    write_urls(tmp_path / "urls.txt", urls(range(10)))
    expected = "bloom.sqlite cannot be used: error_rate is inf; use a number between 0 and 1"
    for scheduler in (None, SAFE):
        line = Crawl(tree.url, tmp_path, {"JOBDIR": "job", "SCHEDULER": scheduler}).refusal()
        assert expected in line
    assert not tree.hits
    for command in (
        ("info", "job", "--scan"),
        ("check", "job", "urls.txt"),
        ("import", "urls.txt", "job"),
        ("copy", "job", "copy"),
        ("report", "job", "-o", "report.html"),
    ):
        assert expected in bloom(*command, cwd=tmp_path).error, command
        assert path.read_bytes() == before, command
    assert [file.name for file in path.parent.glob("bloom.sqlite*")] == [path.name]


# Parts of different ages.


def states(job: Path) -> Iterator[tuple[bytes, bytes]]:
    """Yield file and log of a job as they are in the middle of one run after the other."""
    while True:
        store = InFiles(job, capacity=1000).make()
        store.open(SHOP)
        request_queues.enter(store, *(page(f"{len(contents(job))} {n}") for n in range(200)))
        take(store)
        path = job / "bloom.sqlite"
        yield path.read_bytes(), log_and_index(path)[0].read_bytes()
        store.close()


@pytest.mark.parametrize("is_older", [0, 1], ids=["file", "log"])
def test_an_older_file_or_log_is_refused(is_older: int, tmp_path: Path) -> None:
    """A part was restored from a backup of an earlier run."""
    job, runs = tmp_path / "job", states(tmp_path / "job")
    older, newer = next(runs), next(runs)
    runs.close()
    path = job / "bloom.sqlite"
    parts = [newer[0], newer[1]]
    parts[is_older] = older[is_older]
    for file, data in zip((path, log_and_index(path)[0]), parts, strict=True):
        file.write_bytes(data)

    def use(job: Path) -> None:
        InFiles(job, capacity=1000).make().open(SHOP)

    message = check_refused(use, job, "older")
    assert "a part of it is older than the rest" in message or "malformed" in message


@pytest.mark.parametrize("use", USES)
def test_a_file_that_is_cut_off_is_refused(use: Callable[[Path], None], job: Path) -> None:
    """At no length is it read as a shorter queue, or an emptier filter."""
    rng = random.Random(SEED)
    path = job / "bloom.sqlite"
    good = path.read_bytes()
    lengths = {0, 1, 100, 4095, *range(4096, len(good), 4096), len(good) - 1}
    for length in sorted(lengths | {rng.randrange(len(good)) for _ in range(20)}):
        for entry in log_and_index(path):
            entry.unlink(missing_ok=True)
        path.write_bytes(good[:length])
        check_refused(use, job, f"seed {SEED}, cut off after {length}")
