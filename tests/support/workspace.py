"""A directory with what the examples in the help and the documents speak of."""

import csv
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import redis
from scrapy import Request
from scrapy.utils.request import RequestFingerprinter

from scrapy_bloom.commands.shared.places import RedisPlace
from scrapy_bloom.queues.serialized import serialized
from scrapy_bloom.queues.store import Entered
from scrapy_bloom.redis.server import RedisServer
from tests.support import servers
from tests.support.backends import begun, local_backend, redis_backend
from tests.support.cli import Ran, bloom
from tests.support.copies import copy
from tests.support.request_queues import FINGERPRINTER, InRedis, enter, fill

LOCAL_REDIS = "redis://localhost:6379/0"  # in the documents
SALT = bytes(range(16))


def urls(numbers: Iterable[int]) -> list[str]:
    return [f"https://shop.example/{number}" for number in numbers]


def fingerprints(of: Iterable[str]) -> list[bytes]:
    fingerprinter = RequestFingerprinter()
    return [fingerprinter.fingerprint(Request(url)) for url in of]


def write_urls(path: Path, of: Sequence[str]) -> Path:
    path.write_text("".join(f"{url}\n" for url in of))
    return path


def write_seen(path: Path, of: Iterable[bytes]) -> Path:
    """Write a requests.seen as Scrapy 2.19 does."""
    path.write_bytes(b"".join(len(entry).to_bytes(2, "big") + entry for entry in of))
    return path


def make_filter(directory: Path, recorded: Iterable[bytes], **options) -> Path:
    """Make a filter in a job directory as a crawl leaves it."""
    directory.mkdir(parents=True, exist_ok=True)
    options = {"capacity": 1000, "error_rate": 1e-6, "spider": "shop", **options}
    begun(local_backend(directory, fingerprinter=FINGERPRINTER, **options), recorded).close()
    return directory


def in_redis(key: str, **settings: object) -> dict[str, object]:
    """Return the settings of a crawl with its filter on the server of all tests."""
    url = servers.shared("valkey").url
    return {"BLOOM_REDIS_URL": url, "BLOOM_REDIS_KEY": key, **settings}


def run_examples(commands: Sequence[str], path: Path) -> list[Ran]:
    """Run commands of `scrapy bloom` one after the other, where all that they need is there."""
    url = prepare(path)
    ran = []
    for command in commands:
        arguments = shlex.split(command.replace(LOCAL_REDIS, url))
        ran.append(bloom(*arguments, cwd=path))
    return ran


def prepare(path: Path) -> str:
    """Make what the examples need; the URL of their Redis server."""
    url = f"{servers.shared('valkey').url.removesuffix('/0')}/9"
    client = redis.Redis.from_url(url)
    (path / "jobs/old").mkdir(parents=True)
    (path / "jobs/news").mkdir()
    fill(path / "jobs/news/bloom.sqlite", b"a request")
    (path / "filters").mkdir()
    make_filter(path / "jobs/shop", fingerprints(urls(range(300))))
    write_seen(path / "jobs/old/requests.seen", fingerprints(urls(range(100))))
    write_urls(path / "urls.txt", urls(range(200, 500)))
    write_urls(path / "yesterday.txt", urls(range(100, 300)))
    write_urls(path / "a.txt", urls(range(200)))
    write_urls(path / "b.txt", urls(range(150, 350)))
    links = [{"title": "one,\ntwo", "link": url} for url in urls(range(290, 310))]
    (path / "items.json").write_text(json.dumps(links))
    with (path / "items.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["title", "link"])
        writer.writeheader()
        writer.writerows(links)
    lines = (f'{{"link": "{url}"}}\n' for url in urls(range(200, 400)))
    (path / "items.jl").write_text("".join(lines))
    make_filter(path / "filters/a", fingerprints(urls(range(100))))
    client.flushdb()
    copy(path / "jobs/shop", RedisPlace(RedisServer(url), "shop:bloom"))
    make_queue(url, "shop:bloom", host="ads.test")
    client.rpush("shop:start_urls", *urls(range(600, 603)))
    client.sadd(
        "shop:dupefilter", *[fingerprint.hex() for fingerprint in fingerprints(urls(range(50)))]
    )
    return url


def make_queue(url: str, key: str, host: str = "") -> None:
    """Make a filter in Redis, if there is none, and its queue with one pending request."""
    there = InRedis("valkey", key, url=url)
    store = there.open()
    data = serialized(Request("https://shop.example/waits").to_dict())
    enter(store, Entered(data, slot=host))
    store.close()
    there.end()


def forget_shared(url: str) -> None:
    """Empty a database, so that a filter can be copied into it."""
    redis.Redis.from_url(url).flushdb()


def start_project(path: Path) -> Path:
    """Run `scrapy startproject`."""
    path.mkdir()
    command = [sys.executable, "-m", "scrapy", "startproject", "shopping", "."]
    subprocess.run(command, cwd=path, check=True, capture_output=True, timeout=60)
    return path


def shared_filter(server: servers.Server, key: str, recorded: list[bytes], **options) -> None:
    """Make a filter in Redis as a crawl leaves it."""
    options = {"capacity": 1000, "error_rate": 1e-6, "fingerprinter": FINGERPRINTER, **options}
    begun(redis_backend(RedisServer(server.url), key, **options), recorded).close()


def make_older(job: Path) -> None:
    """Date a pause earlier: Scrapy's own files tell of a kill only a second after the pause."""
    for path in job.rglob("*"):
        status = path.stat()
        os.utime(path, (status.st_atime - 2, status.st_mtime - 2))


def contents(path: Path) -> dict[str, tuple[bytes, int]]:
    """Return the bytes of each file, and when it was changed."""
    return {
        os.fspath(file.relative_to(path)): (file.read_bytes(), file.stat().st_mtime_ns)
        for file in sorted(path.rglob("*"))
        if file.is_file()
    }


def contents_but_index(job: Path) -> dict[str, tuple[bytes, int]]:
    """Return the `contents` without the index of the log, in which SQLite enters its readers."""
    return {name: file for name, file in contents(job).items() if not name.endswith("-shm")}
