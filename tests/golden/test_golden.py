"""Stored formats do not change by accident: filters and killed crawls, in files and in Redis."""

import base64
import hashlib
import json
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.golden.make import ARCHIVE, KEY, QUEUE_KEY, SPIDER, shared
from tests.support import servers
from tests.support.cli import Ran, bloom, scrapy

LOCAL = ["plain", "windowed", "grown"]
# The settings that they were made with.
SETTINGS = ["-n", "300", "-p", "0.01", "-s", "BLOOM_EXPECTED_REQUESTS=300"]
WINDOW = ["-s", "BLOOM_WINDOW_SECS=1000000000"]
NEW = "https://shop.example/another"


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """Unpack all that `make.py` stored into a directory."""
    with tarfile.open(ARCHIVE) as archive:
        # Debian's Python 3.11.2 has no filters yet.
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(tmp_path)
    return tmp_path


def expected(stored: Path, name: str) -> dict[str, Any]:
    return json.loads((stored / "expected.json").read_text())[name]


def ran(stored: Path, *arguments: str) -> Ran:
    ended = bloom(*arguments, cwd=stored)
    assert ended.status == 0, ended
    return ended


def figures(stored: Path, *filter_: str) -> dict[str, Any]:
    """Return the figures of `info`, without the place."""
    return trimmed(ran(stored, "info", *filter_, "--json", "--show-salt").json)


def trimmed(info: dict[str, Any]) -> dict[str, Any]:
    del info["location"]
    return info


def rounded(info: dict[str, Any]) -> dict[str, Any]:
    """Round figures to 12 digits: since Python 3.12 a sum of floats is more exact in the last."""
    return json.loads(json.dumps(info), parse_float=lambda text: f"{float(text):.12g}")


def check_filter(stored: Path, name: str, *filter_: str) -> None:
    """Check its figures and each answer, and that it still records."""
    place, *options = filter_
    wanted = expected(stored, name)
    assert rounded(figures(stored, *filter_)) == rounded(trimmed(wanted["info"]))
    seen = ran(stored, "check", place, "all.txt", "--seen", *options).out.split()
    assert [int(url.rpartition("/")[2]) for url in seen] == wanted["seen"]
    (stored / "new.txt").write_text(NEW + "\n")
    window = WINDOW if wanted["info"]["window_secs"] else []
    ran(stored, "import", "new.txt", place, *options, *SETTINGS, *window)
    assert figures(stored, *filter_)["recorded"] == wanted["info"]["recorded"] + 1
    again = ran(stored, "check", place, "all.txt", "--seen", *options).out.split()
    assert set(seen) <= set(again)
    assert ran(stored, "check", place, "new.txt", "--seen", *options).out.split() == [NEW]


def digests(directory: Path) -> dict[str, str]:
    files = (path for path in directory.rglob("*") if path.is_file())
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def name_this_place(job: Path) -> None:
    """Write its place into the database: otherwise it is a copy of one that was in use."""
    script = (
        "import os, sqlite3, sys\n"
        "path = os.path.realpath(sys.argv[1])\n"
        "db = sqlite3.connect(path, isolation_level=None)\n"
        "place = f'{path} {os.stat(path).st_ino}'\n"
        "db.execute('UPDATE filter_log SET opened_as = ?', [place])\n"
        "os._exit(0)\n"  # SQLite's log stays, as after a kill
    )
    command = [sys.executable, "-c", script, str(job / "requests.sqlite")]
    subprocess.run(command, check=True, timeout=60)
    assert (job / "requests.sqlite-wal").stat().st_size


@pytest.mark.parametrize("name", LOCAL)
def test_a_filter_in_files(stored: Path, name: str) -> None:
    before = digests(stored / name)
    check_filter(stored, name, name)
    # Only the newest generation, that which takes new requests, has been written to.
    changed = {file for file, digest in digests(stored / name).items() if before[file] != digest}
    assert changed == {max(file for file in before if file.startswith("generation-"))}


@pytest.mark.parametrize("program", sorted(servers.PROGRAMS))
def test_a_filter_and_a_queue_in_redis(stored: Path, program: str) -> None:
    server = servers.Server(program)
    try:
        with redis.Redis.from_url(server.url) as client:
            for key, dump in json.loads((stored / "redis.json").read_text()).items():
                client.restore(key, 0, base64.b64decode(dump))
        check_filter(stored, "redis", server.url, "--key", KEY)
        wanted, place = expected(stored, "queue"), (server.url, "--key", QUEUE_KEY)
        assert figures(stored, *place)["queue"]["pending"] == wanted["pending"]
        assert crawled_pages(stored, *shared(server.url)) == wanted["pages"]
    finally:
        server.end()


def crawled_pages(stored: Path, *options: str) -> list[int]:
    crawl = scrapy("runspider", str(SPIDER), "-O", "pages.jl", *options, cwd=stored)
    assert crawl.status == 0, crawl
    lines = (stored / "pages.jl").read_text().splitlines()
    return sorted(json.loads(line)["page"] for line in lines)


def test_a_job_that_was_killed(stored: Path) -> None:
    wanted = expected(stored, "job")
    name_this_place(stored / "job")
    assert rounded(figures(stored, "job")) == rounded(trimmed(wanted["info"]))
    assert crawled_pages(stored, "-sJOBDIR=job") == wanted["pages"]
    queue = figures(stored, "job")["queue"]
    assert (queue["pending"], queue["in_flight"]) == (0, 0)
