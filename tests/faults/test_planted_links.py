"""Symbolic links planted where files are made: what they lead to is not touched.

What a killed process left under that name stops nobody, either.
"""

import os
import sqlite3
import struct
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from scrapy_bloom.job.disk import log_and_index
from tests.support.cli import bloom
from tests.support.crawls import Crawl
from tests.support.sites import Site
from tests.support.workspace import contents, fingerprints, make_filter, urls, write_urls

PAGES = 30
JOB = {"JOBDIR": "job", "SCHEDULER": "scrapy_bloom.CrashSafeScheduler"}
TEXT = "of somebody else\n"


@pytest.fixture(params=["a link", "a leftover"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "victim"
    path.write_text(TEXT)
    yield path
    assert path.read_text() == TEXT


def plant(path: Path, victim: Path, kind: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "a leftover":
        path.write_bytes(b"x" * 100_000)
    else:
        path.symlink_to(victim)


def test_a_new_file_follows_no_link(kind: str, victim: Path, tree: Site, tmp_path: Path) -> None:
    draft = tmp_path / "job/bloom.sqlite.tmp"
    plant(draft, victim, kind)
    crawl = Crawl.finished(tree.url, tmp_path, JOB)
    assert not crawl.our_lines("ERROR") + crawl.our_lines("WARNING")
    assert not draft.exists()
    assert len(tree.hits) == PAGES


def plant_journal(database: Path, victim: Path) -> Path:
    """Write a rollback journal that has SQLite delete a file, if that names no other journal."""
    name, pages = str(victim).encode(), database.stat().st_size // 4096
    head = b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7" + struct.pack(">5I", 0, 0, pages, 512, 4096)
    tail = struct.pack(">II", len(name), sum(name)) + b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7"
    journal = database.with_name(f"{database.name}-journal")
    journal.write_bytes(head.ljust(512, b"\0") + struct.pack(">I", 262145) + name + tail)
    return journal


@pytest.mark.parametrize("scheduler", [None, JOB["SCHEDULER"]])
def test_a_rollback_journal_is_never_read(
    scheduler: str | None, victim: Path, tree: Site, tmp_path: Path
) -> None:
    """It may name any file of the user, which SQLite then deletes."""
    settings = {**JOB, "SCHEDULER": scheduler}
    assert Crawl.held(tree, 10, tmp_path, settings).interrupt() == 0
    path, other = tmp_path / "job/bloom.sqlite", tmp_path / "other.sqlite"
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA journal_mode = DELETE")
    other.write_bytes(path.read_bytes())
    (tmp_path / "deleted").write_text(TEXT)
    plant_journal(other, tmp_path / "deleted")
    with closing(sqlite3.connect(other)) as db:
        db.execute("SELECT * FROM job").fetchall()
    assert not (tmp_path / "deleted").exists()
    journal = plant_journal(path, victim)
    before = contents(tmp_path / "job")
    expected = "bloom.sqlite-journal would make SQLite change bloom.sqlite, and perhaps other"
    assert expected in Crawl(tree.url, tmp_path, settings).refusal()
    write_urls(tmp_path / "urls", urls(range(9)))
    for command in ("info job", "queue job", "copy job copy", "import urls job", "check job urls"):
        assert expected in bloom(*command.split(), cwd=tmp_path).error
    assert contents(tmp_path / "job") == before
    journal.unlink()
    tree.release()
    Crawl.finished(tree.url, tmp_path, settings)
    assert len(tree.hits) == PAGES


PLANTED = {
    "copy/bloom.sqlite.copy": 0,
    "copy/bloom.sqlite.copy.tmp": 0,
    "copy/bloom.sqlite.copy-wal": 0,
    "copy/bloom.lock": 1,
    "copy": 1,
}


@pytest.mark.parametrize("place", PLANTED)
def test_a_copy_follows_no_link(place: str, victim: Path, tmp_path: Path) -> None:
    """The link may lead to a file, or to a directory whose files nobody may remove."""
    make_filter(tmp_path / "filter", fingerprints(urls(range(50))))
    (tmp_path / "precious").mkdir()
    precious = tmp_path / "precious/bloom.sqlite"
    precious.write_text(TEXT)
    status = PLANTED[place]
    plant(tmp_path / place, tmp_path / "precious" if status else victim, "a link")
    ran = bloom("copy", "filter", "copy", cwd=tmp_path)
    assert ran.status == status, ran
    assert [file.read_text() for file in precious.parent.iterdir()] == [TEXT]
    if not status:
        assert bloom("info", "copy", "--json", cwd=tmp_path).json["recorded"] == 50


def test_a_report_follows_no_link(victim: Path, tmp_path: Path) -> None:
    make_filter(tmp_path / "filter", fingerprints(urls(range(50))))
    plant(tmp_path / "page.html", victim, "a link")
    ran = bloom("report", "filter", "-o", "page.html", "--overwrite", cwd=tmp_path)
    assert ran.status == 0, ran
    assert (tmp_path / "page.html").read_text().startswith("<!DOCTYPE html>")
    assert not (tmp_path / "page.html").is_symlink()


FILES = ["bloom.sqlite", "bloom.sqlite-wal", "bloom.sqlite-shm", "bloom.lock"]


@pytest.mark.parametrize("place", [*FILES, "requests.seen"])
def test_a_crawl_refuses_a_link(place: str, victim: Path, tree: Site, tmp_path: Path) -> None:
    plant(tmp_path / "job" / place, victim, "a link")
    line = Crawl(tree.url, tmp_path, JOB).refusal()
    assert f"{place} is a symbolic link" in line


@pytest.mark.parametrize("place", FILES)
def test_a_crawl_writes_to_no_second_name(place: str, tree: Site, tmp_path: Path) -> None:
    """A hard link, as `cp -al` makes it, or somebody who wants another file to be changed."""
    assert Crawl.held(tree, 10, tmp_path, JOB).interrupt() == 0
    file = tmp_path / "job" / place
    file.touch()
    (tmp_path / "other").hardlink_to(file)
    before = (tmp_path / "other").read_bytes()
    tree.release()
    line = Crawl(tree.url, tmp_path, JOB).refusal()
    assert f"{place} is a hard link" in line
    assert bloom("info", "job", cwd=tmp_path).status == (place == "bloom.lock")
    assert (tmp_path / "other").read_bytes() == before


@pytest.mark.parametrize("kind", ["a link", "to zeros", "sparse"])
def test_a_log_that_never_ends_is_not_read(kind: str, tree: Site, tmp_path: Path) -> None:
    Crawl.held(tree, 10, tmp_path, JOB).kill()
    log, index = log_and_index(tmp_path / "job/bloom.sqlite")
    index.unlink()
    if kind == "sparse":
        os.truncate(log, 1 << 40)
    else:
        log.unlink()
        log.symlink_to("/dev/zero" if kind == "to zeros" else __file__)
    for command in ("info", "queue"):
        ran = bloom(command, "job", cwd=tmp_path)
        assert ran.status == (kind != "sparse"), ran  # SQLite reads it up to the first zeros
        assert kind == "sparse" or f"{log.name} is a symbolic link" in ran.error


@pytest.mark.parametrize("kind", ["a symbolic link", "a hard link", "of another user"])
def test_stop_ends_only_a_process_of_the_job(kind: str, tree: Site, tmp_path: Path) -> None:
    """Whoever may write to a job could have another process of its user ended."""
    crawl = Crawl.held(tree, 10, tmp_path, JOB)
    lock = tmp_path / "planted/bloom.lock"
    lock.parent.mkdir(parents=True)
    if kind == "a symbolic link":
        lock.symlink_to(tmp_path / "job/bloom.lock")
    elif kind == "a hard link":
        lock.hardlink_to(tmp_path / "job/bloom.lock")
    elif os.getuid():
        pytest.skip("only root can give a file away")
    else:
        lock.parent.rmdir()
        lock.parent.symlink_to(tmp_path / "job")
        os.chown(lock, 65534, 65534)
    for job in ("planted", "job")[: 1 + (kind == "of another user")]:
        ran = bloom("stop", job, cwd=tmp_path)
        assert ran.status == 1, ran
        assert "cannot be found from here" in ran.error or kind in ran.error
    assert crawl.running()
    tree.release()
    assert crawl.finish() == 0, crawl.output
    assert len(tree.hits) == PAGES


def test_nobody_else_can_lock_a_job(tree: Site, tmp_path: Path) -> None:
    """Whoever can open a lock file for reading can take the lock."""
    crawl = Crawl.held(tree, 10, tmp_path, JOB)
    assert (tmp_path / "job/bloom.lock").stat().st_mode & 0o777 == 0o600
    tree.release()
    assert crawl.finish() == 0
