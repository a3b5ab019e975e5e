"""`scrapy bloom info` of a job with CrashSafeScheduler: it tells figures, and changes nothing."""

import os
from pathlib import Path

import pytest

from tests.support.cli import bloom
from tests.support.crawls import Crawl
from tests.support.sites import Site

SAFE = {"SCHEDULER": "scrapy_bloom.CrashSafeScheduler", "JOBDIR": "job"}


def contents(job: Path) -> dict[str, tuple[bytes, int]]:
    files = (path for path in job.rglob("*") if path.is_file())
    return {os.fspath(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def waiting(path: Path) -> int:
    ran = bloom("info", "job", "--json", cwd=path)
    assert ran.status == 0, ran.err
    queue = ran.json["queue"]
    return queue["pending"] + queue["in_flight"]


def crawled_for_a_while(site: Site, path: Path) -> Crawl:
    return Crawl.held(site, 30, path, SAFE)


@pytest.mark.parametrize("parts", [("-wal", "-shm"), ("-wal",)])
def test_after_a_kill(parts: tuple[str, ...], tree: Site, tmp_path: Path) -> None:
    crawled_for_a_while(tree, tmp_path).kill()
    if "-shm" not in parts:  # as in a copy of the job
        (tmp_path / "job/requests.sqlite-shm").unlink()
    before = contents(tmp_path / "job")
    assert {f"{tmp_path}/job/requests.sqlite{part}" for part in parts} <= set(before)
    assert waiting(tmp_path) > 0
    assert contents(tmp_path / "job") == before


def test_after_a_pause_also_where_nothing_may_be_written(tree: Site, tmp_path: Path) -> None:
    job = tmp_path / "job"
    crawled_for_a_while(tree, tmp_path).interrupt()
    before = contents(job)
    assert waiting(tmp_path) > 0
    assert contents(job) == before
    for path in (job, *job.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        assert waiting(tmp_path) > 0
        assert contents(job) == before
    finally:
        for path in (job, *job.rglob("*")):
            path.chmod(0o755)
