"""Store a filter in files and in Redis, and a killed job, in an archive for `test_golden.py`.

    python -m tests.golden.make tests/golden/format-1.tar.gz

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

RECORDED, NEVER = range(1000), range(1000, 4000)
KEY = "golden:bloom"
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
    """What a filter says: its figures, and which of all URLs it takes for seen."""
    seen = run(directory, "check", filter_[0], "all.txt", "--seen", *filter_[1:]).split()
    return {
        "info": figures(directory, *filter_),
        "seen": [int(url.rpartition("/")[2]) for url in seen],
    }


def crawl(directory: Path, job: str, *options: str) -> tuple[int, list[int]]:
    """Crawl in a job directory: the exit status, and the pages that were items."""
    command = [sys.executable, "-m", "scrapy", "runspider", str(HERE / "spider.py")]
    items = directory / f"{job}.jl"
    ran = subprocess.run(
        [*command, "-s", f"JOBDIR={job}", "-O", items.name, *options],
        cwd=directory,
        check=False,
        timeout=60,
    )
    lines = items.read_text().splitlines() if ran.returncode == 0 else []
    items.unlink(missing_ok=True)
    return ran.returncode, sorted(json.loads(line)["page"] for line in lines)


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
        with closing(redis.Redis.from_url(server.url)) as client:
            keys = sorted(client.scan_iter(f"*{KEY}*"))
            dump = {key.decode(): base64.b64encode(client.dump(key)).decode() for key in keys}
        (directory / "redis.json").write_text(json.dumps(dump, indent=1) + "\n")
    finally:
        server.end()

    # A job whose crawl was killed: pending, in flight and done requests, and a filter.
    assert crawl(directory, "job", "-a", "die_at=20") == (-9, [])
    shutil.copytree(directory / "job", directory / "killed")
    info = figures(directory, "job")
    status, pages = crawl(directory, "job")  # not the copy: that would start over
    assert status == 0
    expected["job"] = {"info": info, "pages": pages}
    shutil.rmtree(directory / "job")
    (directory / "killed").rename(directory / "job")
    (directory / "expected.json").write_text(json.dumps(expected) + "\n")


if __name__ == "__main__":
    archive = Path(sys.argv[1]).absolute()
    with tempfile.TemporaryDirectory() as name:
        main(Path(name))
        with tarfile.open(archive, "w:gz") as tar:
            for path in sorted(Path(name).iterdir()):
                tar.add(path, path.name, filter=without_memory)
