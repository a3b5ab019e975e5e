"""What it costs that requests are forgotten: for those that are not, and in memory."""

import gc
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

from scrapy import Request
from scrapy.utils.request import RequestFingerprinter

from benchmarks.shared import samples, servers
from benchmarks.shared.machine import in_fresh_process, resident_bytes
from benchmarks.shared.report import Section, Table, at_most, quartiles
from benchmarks.shared.timing import timed
from scrapy_bloom import BloomDupeFilter
from scrapy_bloom.files.backend import LocalBackend
from scrapy_bloom.generations.policy import Policy
from scrapy_bloom.redis.backend import RedisBackend
from scrapy_bloom.redis.connection.server import RedisServer
from scrapy_bloom.settings.settings import BloomSettings

LIMIT, MEMORY_LIMIT_MB = 1.05, 8.0
FORGOTTEN = 1000
ASKED = 50_000  # real requests among the recorded ones: those that are asked for
TIMEOUT_SECS = 600
_FINGERPRINTER = RequestFingerprinter()


def run(quick: bool) -> Section:  # noqa: FBT001 - every benchmark is called like this
    recorded, rounds, size = (20_000, 5, 2000) if quick else (1_000_000, 40, 20_000)
    million = 50_000 if quick else 1_000_000
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        ratios = {
            "in a file": _ratios(lambda key: _local(place / key), recorded, rounds, size, new=0)
        }
    for name, program in servers.programs().items():
        with servers.running(program) as server:
            ratios[f"in {name}, 90 % duplicates"] = _ratios(
                lambda key, server=server: _redis(server, key),  # type: ignore[misc]
                recorded,
                rounds,
                size // 10,
                new=10,
            )
    with tempfile.TemporaryDirectory() as directory:
        grown = in_fresh_process(TIMEOUT_SECS, _memory, Path(directory), million) / 1e6
    checks = [
        at_most(f"{where}: relative to nothing forgotten", median(each), LIMIT)
        for where, each in ratios.items()
    ]
    checks.append(at_most(f"memory of {million:,} forgotten, MB", grown, MEMORY_LIMIT_MB))
    return Section(
        title="Forgetting",
        method=(
            f"`request_seen(request)` with BLOOM_FORGET_FAILED and {FORGOTTEN:,} forgotten ones, "
            f"and without both, in filters of {recorded:,} recorded requests: {rounds} rounds of "
            f"{size:,} duplicates (in a file), and of {size // 10:,} requests of which 90 % are "
            "duplicates (in Redis and Valkey, with a mirror). The two filters take turns. And the "
            f"growth of a process (RSS) that forgets {million:,} requests, in a file."
        ),
        checks=checks,
        tables=[
            Table(
                ("time relative to nothing forgotten", "25 %", "median", "75 %"),
                [(where, *map("{:.3f}".format, quartiles(each))) for where, each in ratios.items()],
            )
        ],
    )


def _ratios(
    make: Callable[[str], Any], recorded: int, rounds: int, size: int, *, new: int
) -> Sequence[float]:
    """Time of each round with forgotten requests, relative to that without."""
    with (
        _filter(make("plain"), recorded, forget_failed=False) as plain,
        _filter(make("with"), recorded, forget_failed=True) as forgetting,
    ):
        forgetting.backend.forgotten.add(list(map(_fingerprint, range(FORGOTTEN))))
        ratios = []
        fresh = recorded
        for number in range(rounds):
            start = FORGOTTEN + number * size % (min(recorded, ASKED) - FORGOTTEN - size)
            numbers = list(range(start, start + size))
            if new:  # every tenth
                numbers[::new] = range(fresh, fresh + len(numbers[::new]))
                fresh += len(numbers[::new])
            secs = []
            for each in (plain, forgetting) if number % 2 else (forgetting, plain):
                taken, seen = timed(each.request_seen, [Request(samples.url(n)) for n in numbers])
                assert seen >= size - (len(numbers[::new]) if new else 0)
                secs.append(taken)
            if not number % 2:
                secs.reverse()
            ratios.append(secs[1] / secs[0])
    return ratios


def _fingerprint(number: int) -> bytes:
    return _FINGERPRINTER.fingerprint(Request(samples.url(number)))


@contextmanager
def _filter(backend: Any, recorded: int, *, forget_failed: bool) -> Iterator[BloomDupeFilter]:
    crawler = samples.crawler(Path())
    methods = ("enqueue_scrape", "call_spider_async", "handle_spider_error")
    engine: Any = SimpleNamespace(scraper=SimpleNamespace(**dict.fromkeys(methods)))
    crawler.engine = engine  # nothing is downloaded
    backend.open()
    backend.begin()
    asked = min(recorded, ASKED)
    fingerprints = chain(map(_fingerprint, range(asked)), samples.fingerprints(0, recorded - asked))
    if isinstance(backend, RedisBackend):
        while batch := list(islice(fingerprints, 1000)):
            backend.add_many(batch)
    else:
        for each in fingerprints:
            backend.add(each)
    dupefilter = BloomDupeFilter(crawler, backend, BloomSettings(forget_failed=forget_failed))
    yield dupefilter
    dupefilter.close("finished")


def _local(directory: Path) -> LocalBackend:
    return LocalBackend(directory, Policy(expected=1_000_000, error_rate=1e-9))


def _redis(server: servers.Server, key: str) -> RedisBackend:
    return RedisBackend(RedisServer(server.url), key, Policy(expected=1_000_000, error_rate=1e-9))


def _memory(directory: Path, number: int) -> int:
    """How much a process grows that forgets so many requests."""
    backend = LocalBackend(directory, Policy(expected=number, error_rate=1e-9))
    backend.open()
    backend.begin()
    for fingerprint in samples.fingerprints(0, number):
        backend.add(fingerprint)
    backend.forgotten.add(list(samples.fingerprints(0, 1)))  # SQLite is loaded
    gc.collect()
    before = resident_bytes()
    fingerprints = samples.fingerprints(0, number)
    while batch := list(islice(fingerprints, 100)):
        backend.forgotten.add(batch)
    del batch
    gc.collect()
    grown = resident_bytes() - before
    backend.close()
    return grown
