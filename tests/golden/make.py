"""Make the archive that `test_golden.py` reads: filters and killed crawls in the stored formats.

    python -m tests.golden.make

It needs Debian's redis-server: newer servers load what an older one dumps, not the other way round.
Once a format is released, its archive stays, and a new format gets one of its own.
"""

import base64
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from contextlib import closing
from pathlib import Path

import redis

from tests.support.servers import Server

HERE = Path(__file__).parent
ARCHIVE = HERE / "format-1.tar.gz"
SPIDER = HERE / "spider.py"

RECORDED, NEVER = range(1000), range(1000, 4000)
KEY, QUEUE_KEY = "golden:bloom", "golden:queue"
OPTIONS = ["-n", "300", "-p", "0.01", "-s", "BLOOM_EXPECTED_REQUESTS=300"]


def write_lists(directory: Path) -> None:
    """Write the first 290 URLs, those that only a grown filter holds, and all with others."""
    lists = {"few": RECORDED[:290], "more": RECORDED[290:], "all": [*RECORDED, *NEVER]}
    for name, numbers in lists.items():
        text = "".join(f"https://shop.example/{number}\n" for number in numbers)
        (directory / f"{name}.txt").write_text(text)


def run(directory: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "scrapy", "bloom", *arguments]
    ran = subprocess.run(
        command, cwd=directory, capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def figures(directory: Path, *filter_: str) -> dict[str, object]:
    return json.loads(run(directory, "info", *filter_, "--json", "--show-salt"))


def answers(directory: Path, *filter_: str) -> dict[str, object]:
    """Return the figures of a filter, and which of all URLs it reports as duplicates."""
    seen = run(directory, "check", filter_[0], "all.txt", "--seen", *filter_[1:]).split()
    return {
        "info": figures(directory, *filter_),
        "seen": [int(url.rpartition("/")[2]) for url in seen],
    }


def crawl(directory: Path, *options: str) -> tuple[int, list[int]]:
    """Crawl; return the exit status, and the pages that were items."""
    command = [sys.executable, "-m", "scrapy", "runspider", str(SPIDER)]
    items = directory / "items.jl"
    ran = subprocess.run(
        [*command, "-O", items.name, *options], cwd=directory, check=False, timeout=60
    )
    lines = items.read_text().splitlines() if ran.returncode == 0 else []
    items.unlink(missing_ok=True)
    return ran.returncode, sorted(json.loads(line)["page"] for line in lines)


def shared(url: str) -> list[str]:
    """Return the options of a crawl whose queue is in Redis."""
    settings = {"BACKEND": "redis", "REDIS_URL": url, "REDIS_KEY": QUEUE_KEY, "QUEUE_LEASE_SECS": 3}
    return [f"-sBLOOM_{name}={value}" for name, value in settings.items()]


def without_memory(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Leave out SQLite's shared memory: no other machine has it."""
    return None if member.name.endswith("-shm") else member


def main(directory: Path) -> None:
    write_lists(directory)
    window = ["-s", "BLOOM_WINDOW_SECS=1000000000"]  # the longest: they shall not expire soon
    for name, options in {"plain": [], "windowed": window, "grown": []}.items():
        run(directory, "import", "few.txt", name, *OPTIONS, *options)
    run(directory, "import", "more.txt", "grown", *OPTIONS)
    run(directory, "forget", "plain", "https://shop.example/7")
    expected = {name: answers(directory, name) for name in ("plain", "windowed", "grown")}

    server = Server("redis")
    try:
        run(directory, "import", "few.txt", server.url, "--key", KEY, *OPTIONS)
        run(directory, "import", "more.txt", server.url, "--key", KEY, *OPTIONS)
        run(directory, "forget", server.url, "--key", KEY, "https://shop.example/7")
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
