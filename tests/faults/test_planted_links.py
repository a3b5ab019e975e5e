"""Symbolic links planted where files are made: what they lead to is not touched.

What a killed process left under that name stops nobody, either.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from scrapy_bloom.job.disk import log_and_index
from tests.support.cli import bloom
from tests.support.crawls import Crawl
from tests.support.sites import Site
from tests.support.workspace import fingerprints, make_filter, urls

PAGES = 90
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


def test_a_new_generation_follows_no_link(
    kind: str, victim: Path, tree: Site, tmp_path: Path
) -> None:
    crawl = Crawl.held(tree, 10, tmp_path, {**JOB, "BLOOM_EXPECTED_REQUESTS": 40})
    plant(tmp_path / "job/bloom/generation-0002.bloom.tmp", victim, kind)
    tree.release()
    assert crawl.finish() == 0, crawl.output
    assert not crawl.our_lines("ERROR") + crawl.our_lines("WARNING")
    assert (tmp_path / "job/bloom/generation-0002.bloom").is_file()
    assert len(tree.hits) == PAGES


def test_log_json_follows_no_link(kind: str, victim: Path, tree: Site, tmp_path: Path) -> None:
    crawl = Crawl.held(tree, 10, tmp_path, JOB)
    note = tmp_path / "job/bloom/log.json"
    if kind == "a link":  # to what it was: it is read, and not written
        note.rename(victim)
        note.symlink_to(victim)
        before = victim.read_bytes()
    plant(tmp_path / "job/bloom/log.json.tmp", victim, kind)
    assert crawl.interrupt() == 0
    crawl = Crawl.finished(tree.url, tmp_path, JOB)
    assert not crawl.our_lines("ERROR") + crawl.our_lines("WARNING")
    assert note.is_file()
    assert not note.is_symlink()
    assert not note.with_name("log.json.tmp").exists()
    assert len(tree.hits) == PAGES
    if kind == "a link":
        assert victim.read_bytes() == before
        victim.write_text(TEXT)


@pytest.mark.parametrize("place", ["precious", "bloom/precious", "bloom/generation-x.bloom"])
def test_a_copy_removes_only_what_a_copy_makes(place: str, tmp_path: Path) -> None:
    make_filter(tmp_path / "filter", fingerprints(urls(range(50))))
    precious = tmp_path / "copy.unfinished-copy" / place
    ours = tmp_path / "copy.unfinished-copy/requests.sqlite"
    precious.parent.mkdir(parents=True)
    for path in (precious, ours):
        path.write_text(TEXT)
    ran = bloom("copy", "filter", "copy", cwd=tmp_path)
    assert ran.status == 1, ran
    assert f"{place} is in the way; nothing was changed: move it away" in ran.error
    assert precious.read_text() == ours.read_text() == TEXT


PLANTED = {
    "copy.unfinished-copy/requests.sqlite": 0,
    "copy.unfinished-copy/bloom/generation-0001.bloom.tmp": 0,
    "copy.unfinished-copy/bloom": 1,
    "copy.unfinished-copy": 1,
    "copy": 1,
}


@pytest.mark.parametrize("place", PLANTED)
def test_a_copy_follows_no_link(place: str, victim: Path, tmp_path: Path) -> None:
    """The link may lead to a file, or to a directory whose files nobody may remove."""
    make_filter(tmp_path / "filter", fingerprints(urls(range(50))))
    (tmp_path / "precious").mkdir()
    precious = tmp_path / "precious/requests.sqlite"
    precious.write_text(TEXT)
    status = PLANTED[place]
    plant(tmp_path / place, tmp_path / "precious" if status else victim, "a link")
    ran = bloom("copy", "filter", "copy", cwd=tmp_path)
    assert ran.status == status, ran
    assert [each.read_text() for each in precious.parent.iterdir()] == [TEXT]
    if not status:
        assert bloom("info", "copy", "--json", cwd=tmp_path).json["recorded"] == 50


def test_a_report_follows_no_link(kind: str, victim: Path, tmp_path: Path) -> None:
    make_filter(tmp_path / "filter", fingerprints(urls(range(50))))
    make = "head -c 100000 /dev/zero >" if kind == "a leftover" else f"ln -s {victim}"
    script = f'{make} .page.html.$$.tmp && exec "$@"'
    ran = bloom(
        "report", "filter", "-o", "page.html", cwd=tmp_path, under=("sh", "-c", script, "sh")
    )
    assert ran.status == 0, ran
    assert (tmp_path / "page.html").read_text().startswith("<!DOCTYPE html>")
    assert not (tmp_path / "page.html").is_symlink()
    assert not list(tmp_path.glob(".page*"))


FILES = [
    "requests.sqlite",
    "requests.sqlite-wal",
    "requests.sqlite-shm",
    "bloom/lock",
    "bloom/log.json",
    "bloom/generation-0001.bloom",
]


@pytest.mark.parametrize("place", [*FILES, "requests.seen"])
def test_a_crawl_refuses_a_link(place: str, victim: Path, tree: Site, tmp_path: Path) -> None:
    if place == "bloom/log.json":  # which is read if there is a filter
        make_filter(tmp_path / "job/bloom", [])
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
    if place == "bloom/log.json":  # which is replaced
        Crawl.finished(tree.url, tmp_path, JOB)
    else:
        line = Crawl(tree.url, tmp_path, JOB).refusal()
        assert f"{place} is a hard link" in line
        assert bloom("info", "job", cwd=tmp_path).status == (place == "bloom/lock")
    assert (tmp_path / "other").read_bytes() == before


@pytest.mark.parametrize("kind", ["a link", "to zeros", "sparse"])
def test_a_log_that_never_ends_is_not_read(kind: str, tree: Site, tmp_path: Path) -> None:
    """Without its index, SQLite can read it only in a copy."""
    Crawl.held(tree, 10, tmp_path, JOB).kill()
    log, index = log_and_index(tmp_path / "job/requests.sqlite")
    index.unlink()
    if kind == "sparse":
        os.truncate(log, 1 << 40)
    else:
        log.unlink()
        log.symlink_to("/dev/zero" if kind == "to zeros" else __file__)
    for command in ("info", "queue", "stop"):
        ran = bloom(command, "job", cwd=tmp_path, under=("timeout", "20"))
        assert ran.status == 1, ran
        assert str(log.name) in ran.error
        assert ("is a symbolic link" in ran.error) == (kind != "sparse")
        assert ("which is more than a crawl leaves there" in ran.error) == (kind == "sparse")


@pytest.mark.parametrize("kind", ["a symbolic link", "a hard link", "of another user"])
def test_stop_ends_only_a_process_of_the_job(kind: str, tree: Site, tmp_path: Path) -> None:
    """Whoever may write to a job could have another process of its user ended."""
    crawl = Crawl.held(tree, 10, tmp_path, JOB)
    lock = tmp_path / "planted/bloom/lock"
    lock.parent.mkdir(parents=True)
    if kind == "a symbolic link":
        lock.symlink_to(tmp_path / "job/bloom/lock")
    elif kind == "a hard link":
        lock.hardlink_to(tmp_path / "job/bloom/lock")
    elif os.getuid():
        pytest.skip("only root can give a file away")
    else:
        lock.parent.rmdir()
        lock.parent.symlink_to(tmp_path / "job/bloom")
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
    assert (tmp_path / "job/bloom/lock").stat().st_mode & 0o777 == 0o600
    tree.release()
    assert crawl.finish() == 0
