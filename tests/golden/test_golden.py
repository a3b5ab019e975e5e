"""What earlier code has stored opens unchanged: filters in files and in Redis, and a killed job."""

import base64
import hashlib
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
import redis

import servers
from cli import Ran, bloom, scrapy
from scrapy_bloom.job.paths import IN_USE, boot_id

GOLDEN = Path(__file__).parent
KEY = "golden:bloom"
LOCAL = ["plain", "windowed", "grown"]
# The settings that they were made with.
SETTINGS = ["-n", "300", "-p", "0.01", "-s", "BLOOM_EXPECTED_REQUESTS=300"]
WINDOW = ["-s", "BLOOM_WINDOW_SECS=1000000000"]
NEW = "https://shop.example/another"


@pytest.fixture(params=sorted(GOLDEN.glob("*.tar.gz")), ids=lambda path: path.name)
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A directory with all that the code of one day stored."""
    with tarfile.open(request.param) as archive:
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
    """What `info` tells, but for the place."""
    told = ran(stored, "info", *filter_, "--json", "--show-salt").json
    del told["location"]
    # What the code of that day left out.
    if told["queue"]:
        told["queue"] = {name: told["queue"][name] for name in ("pending", "in_flight")}
    for generation in told["generations"]:
        if generation["file"] is None:
            del generation["file"]
    return told


def rounded(told: dict[str, Any]) -> dict[str, Any]:
    """The figures to 12 digits: since Python 3.12 a sum of floats is more exact in the last one."""
    return json.loads(json.dumps(told), parse_float=lambda text: f"{float(text):.12g}")


def check_filter(stored: Path, name: str, *filter_: str) -> None:
    """Check its figures and each answer, and that it goes on recording."""
    place, *options = filter_
    wanted = expected(stored, name)
    del wanted["info"]["location"]
    wanted["info"].setdefault("queue", None)
    assert rounded(figures(stored, *filter_)) == rounded(wanted["info"])
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


def name_this_boot(job: Path) -> None:
    """Let the in-use marker name this start of this machine, so that the job was not cut off."""
    mark = job / IN_USE
    text, filter_id, _, end = mark.read_text().split("\n")
    mark.write_text(f"{text}\n{filter_id}\n{boot_id()}\n{end}")


@pytest.mark.parametrize("name", LOCAL)
def test_a_filter_in_files(stored: Path, name: str) -> None:
    before = digests(stored / name)
    check_filter(stored, name, name)
    # Only the newest generation, that which takes new requests, has been written to.
    changed = {file for file, digest in digests(stored / name).items() if before[file] != digest}
    assert changed == {max(file for file in before if file.startswith("generation-"))}


@pytest.mark.parametrize("program", sorted(servers.PROGRAMS))
def test_a_filter_in_redis(stored: Path, program: str) -> None:
    server = servers.Server(program)
    try:
        with redis.Redis.from_url(server.url) as client:
            for key, dump in json.loads((stored / "redis.json").read_text()).items():
                client.restore(key, 0, base64.b64decode(dump))
        check_filter(stored, "redis", server.url, "--key", KEY)
    finally:
        server.end()


def test_a_job_that_was_killed(stored: Path) -> None:
    wanted = expected(stored, "job")
    del wanted["info"]["location"]
    name_this_boot(stored / "job")
    assert figures(stored, "job") == wanted["info"]
    spider = str(GOLDEN / "spider.py")
    crawl = scrapy("runspider", spider, "-s", "JOBDIR=job", "-O", "pages.jl", cwd=stored)
    assert crawl.status == 0, crawl
    lines = (stored / "pages.jl").read_text().splitlines()
    assert sorted(json.loads(line)["page"] for line in lines) == wanted["pages"]
    queue = figures(stored, "job")["queue"]
    assert (queue["pending"], queue["in_flight"]) == (0, 0)
