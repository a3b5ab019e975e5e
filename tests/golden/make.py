"""Make the archive that `test_golden.py` reads: filters and killed crawls in the stored formats.

    python -m tests.golden.make

It needs Debian's redis-server: newer servers load what an older one dumps, not the other way round.
Once a format is released, its archive stays, and a new format gets one of its own.
"""

import base64
import json
import shutil
import tarfile
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import redis

from tests.support.cli import bloom, scrapy
from tests.support.servers import Server

HERE = Path(__file__).parent
ARCHIVE = HERE / "format-1.tar.gz"
SPIDER = HERE / "spider.py"

RECORDED, NEVER = range(1000), range(1000, 4000)
KEY, QUEUE_KEY = "golden:bloom", "golden:queue"
WINDOW = ["-s", "BLOOM_WINDOW_SECS=1000000000"]  # the longest: they shall not expire soon
OPTIONS = ["-s", "BLOOM_EXPECTED_REQUESTS=300", "-s", "BLOOM_ERROR_RATE=0.01"]


def write_lists(directory: Path) -> None:
    """Write the first 240 URLs, those that only a grown filter holds, and all with others."""
    lists = {"few": RECORDED[:240], "more": RECORDED[240:], "all": [*RECORDED, *NEVER]}
    for name, numbers in lists.items():
        text = "".join(f"https://shop.example/{number}\n" for number in numbers)
        (directory / f"{name}.txt").write_text(text)


def run(directory: Path, *arguments: str) -> str:
    ran = bloom(*arguments, cwd=directory)
    assert ran.status == 0, ran
    return ran.out


def read(text: str) -> dict[str, Any]:
    """Read figures, to 12 digits: since Python 3.12 a sum of floats is more exact in the last."""
    return json.loads(text, parse_float=lambda digits: float(f"{float(digits):.12g}"))


def figures(directory: Path, *filter_: str) -> dict[str, Any]:
    """Return the figures of `info`, without the place."""
    info = read(run(directory, "info", *filter_, "--json", "--show-salt"))
    del info["location"]
    return info


def seen(directory: Path, *filter_: str) -> list[int]:
    """Return which of all URLs a filter reports as duplicates."""
    found = run(directory, "check", filter_[0], "all.txt", "--seen", *filter_[1:]).split()
    return [int(url.rpartition("/")[2]) for url in found]


def answers(directory: Path, *filter_: str) -> dict[str, Any]:
    return {"info": figures(directory, *filter_), "seen": seen(directory, *filter_)}


def crawl(directory: Path, *options: str) -> tuple[int, list[int]]:
    """Crawl; return the exit status, and the pages that were items."""
    items = directory / "items.jl"
    ran = scrapy("runspider", str(SPIDER), "-O", items.name, *options, cwd=directory)
    lines = items.read_text().splitlines() if ran.status == 0 else []
    items.unlink(missing_ok=True)
    return ran.status, sorted(json.loads(line)["page"] for line in lines)


def shared(url: str) -> list[str]:
    """Return the options of a crawl whose queue is in Redis."""
    settings = {"REDIS_URL": url, "REDIS_KEY": QUEUE_KEY, "QUEUE_LEASE_SECS": 3}
    return [f"-sBLOOM_{name}={value}" for name, value in settings.items()]


def without_memory(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Leave out SQLite's shared memory: no other machine has it."""
    return None if member.name.endswith("-shm") else member


def main(directory: Path) -> None:
    write_lists(directory)
    for name, options in {"plain": [], "windowed": WINDOW, "grown": []}.items():
        run(directory, "import", "few.txt", name, *OPTIONS, *options)
    run(directory, "import", "more.txt", "grown", *OPTIONS)
    expected = {name: answers(directory, name) for name in ("plain", "windowed", "grown")}

    server = Server("redis")
    try:
        run(directory, "import", "few.txt", server.url, "--key", KEY, *OPTIONS)
        run(directory, "import", "more.txt", server.url, "--key", KEY, *OPTIONS)
        expected["redis"] = answers(directory, server.url, "--key", KEY)
        # A crawl whose only worker was killed, and its shared queue.
        assert crawl(directory, *shared(server.url), "-a", "die_at=20") == (-9, [])
        with closing(redis.Redis.from_url(server.url)) as client:
            keys = sorted(client.scan_iter("*golden:*"))
            dump = {key.decode(): base64.b64encode(client.dump(key)).decode() for key in keys}
        (directory / "redis.json").write_text(json.dumps(dump, indent=1) + "\n")
        queue = figures(directory, server.url, "--key", QUEUE_KEY)["queue"]
        status, pages = crawl(directory, *shared(server.url))
        assert status == 0
        expected["queue"] = {"pending": queue["pending"], "pages": pages}
    finally:
        server.end()

    # A job whose crawl was killed: pending, in flight and done requests, and a filter.
    job = ["-sJOBDIR=job"]
    assert crawl(directory, *job, "-a", "die_at=20") == (-9, [])
    shutil.copytree(directory / "job", directory / "killed")
    info = figures(directory, "job")
    status, pages = crawl(directory, *job)  # not the copy: that would start over
    assert status == 0
    expected["job"] = {"info": info, "pages": pages}
    shutil.rmtree(directory / "job")
    (directory / "killed").rename(directory / "job")
    (directory / "expected.json").write_text(json.dumps(expected) + "\n")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        main(Path(name))
        with tarfile.open(ARCHIVE, "w:gz") as tar:
            for path in sorted(Path(name).iterdir()):
                tar.add(path, path.name, filter=without_memory)
