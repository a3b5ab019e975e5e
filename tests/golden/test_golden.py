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

from tests.golden.make import (
    ARCHIVE,
    KEY,
    OPTIONS,
    QUEUE_KEY,
    WINDOW,
    answers,
    crawl,
    figures,
    read,
    run,
    seen,
    shared,
)
from tests.support import servers

LOCAL = ["plain", "windowed", "grown"]
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
    wanted = read((stored / "expected.json").read_text())[name]
    wanted.get("info", {}).pop("location", None)
    return wanted


def check_filter(stored: Path, name: str, *filter_: str) -> None:
    """Check its figures and each answer, and that it still records."""
    place, *options = filter_
    wanted = expected(stored, name)
    assert answers(stored, *filter_) == wanted
    (stored / "new.txt").write_text(NEW + "\n")
    window = WINDOW if wanted["info"]["window_secs"] else []
    run(stored, "import", "new.txt", place, *options, *OPTIONS, *window)
    assert figures(stored, *filter_)["recorded"] == wanted["info"]["recorded"] + 1
    assert set(wanted["seen"]) <= set(seen(stored, *filter_))
    assert run(stored, "check", place, "new.txt", "--seen", *options).split() == [NEW]


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
        "db.execute('UPDATE job SET opened_as = ?', [place])\n"
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
        assert crawl(stored, *shared(server.url)) == (0, wanted["pages"])
    finally:
        server.end()


def test_a_job_that_was_killed(stored: Path) -> None:
    wanted = expected(stored, "job")
    name_this_place(stored / "job")
    assert figures(stored, "job") == wanted["info"]
    assert crawl(stored, "-sJOBDIR=job") == (0, wanted["pages"])
    queue = figures(stored, "job")["queue"]
    assert (queue["pending"], queue["in_flight"]) == (0, 0)
