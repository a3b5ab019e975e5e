"""Symbolic links planted where files are made: what they lead to is not touched.

What a killed process left under that name stops nobody, either.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

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


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("requests.sqlite", "requests.sqlite is a symbolic link"),
        ("requests.sqlite-wal", "requests.sqlite-wal is a symbolic link"),
        ("bloom/lock", "job/bloom cannot be written to"),
    ],
)
def test_a_crawl_refuses_a_link(
    place: str, reason: str, victim: Path, tree: Site, tmp_path: Path
) -> None:
    plant(tmp_path / "job" / place, victim, "a link")
    line = Crawl(tree.url, tmp_path, JOB).refusal()
    assert reason in line


def test_nobody_else_can_lock_a_job(tree: Site, tmp_path: Path) -> None:
    """Whoever can open a lock file for reading can take the lock."""
    crawl = Crawl.held(tree, 10, tmp_path, JOB)
    assert (tmp_path / "job/bloom/lock").stat().st_mode & 0o777 == 0o600
    tree.release()
    assert crawl.finish() == 0
