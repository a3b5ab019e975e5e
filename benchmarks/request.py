"""What one request costs with this filter, and with Scrapy's own."""

import gc
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import perf_counter

from scrapy import Request
from scrapy.dupefilters import BaseDupeFilter, RFPDupeFilter

from benchmarks import samples
from benchmarks.report import Section, Table, at_most, quartiles
from scrapy_bloom import BloomDupeFilter

LIMIT = 1.05
PASSES = ("new", "duplicate")
CLASSES: tuple[type[BaseDupeFilter], ...] = (BloomDupeFilter, RFPDupeFilter)
OURS, SCRAPYS = (kind.__name__ for kind in CLASSES)


def run(quick: bool) -> Section:  # noqa: FBT001 - every benchmark is called like this
    rounds, size = (3, 500) if quick else (20, 15_000)
    times = _measured(rounds, size)
    ratios, rows = {}, []
    for what in PASSES:
        ours, scrapys = times[OURS, what], times[SCRAPYS, what]
        ratios[what] = [mine / theirs for mine, theirs in zip(ours, scrapys, strict=True)]
        rows += [
            _row(f"{what}: {OURS}, µs", ours, "{:.2f}"),
            _row(f"{what}: {SCRAPYS}, µs", scrapys, "{:.2f}"),
            _row(f"{what}: ratio in one round", ratios[what], "{:.3f}"),
        ]
    return Section(
        title="One request",
        method=(
            "`Request(url)` and `request_seen(request)`, both filters with a JOBDIR and otherwise "
            f"default settings. {rounds} rounds of {size:,} URLs that were not used before. Each "
            "round times both filters on the same URLs, as new requests and then as duplicates, "
            "and begins with the other filter than the round before. Garbage is collected before "
            "each timing, and not within it."
        ),
        checks=[at_most("new requests, time relative to Scrapy's", median(ratios["new"]), LIMIT)],
        tables=[Table(("figure", "25 %", "median", "75 %"), rows)],
        notes=(
            "`Request(url)` and its fingerprint, which any filter needs, are part of both times."
        ),
    )


def _measured(rounds: int, size: int) -> dict[tuple[str, str], list[float]]:
    """Microseconds per request of each round, by filter and pass."""
    times: dict[tuple[str, str], list[float]] = {
        (name, what): [] for name in (OURS, SCRAPYS) for what in PASSES
    }
    with tempfile.TemporaryDirectory() as directory:
        filters = [_opened(kind, Path(directory, kind.__name__)) for kind in CLASSES]
        for number in range(rounds):
            urls = [samples.url(i) for i in range(number * size, (number + 1) * size)]
            for what in PASSES:
                for dupefilter in filters:
                    secs, seen = _pass(dupefilter, urls)
                    times[type(dupefilter).__name__, what].append(secs / size * 1e6)
                    assert seen == size if what == "duplicate" else seen <= 1, (dupefilter, seen)
            filters.reverse()
        for dupefilter in filters:
            dupefilter.close("finished")
    return times


def _pass(dupefilter: BaseDupeFilter, urls: Sequence[str]) -> tuple[float, int]:
    """Seconds for all requests, and how many of them had been seen."""
    request_seen = dupefilter.request_seen
    seen = 0
    gc.collect()
    gc.disable()
    try:
        begun = perf_counter()
        for url in urls:
            seen += request_seen(Request(url))
        return perf_counter() - begun, seen
    finally:
        gc.enable()


def _opened(kind: type[BaseDupeFilter], job_dir: Path) -> BaseDupeFilter:
    dupefilter = kind.from_crawler(samples.crawler(job_dir))
    dupefilter.open()
    return dupefilter


def _row(name: str, values: Sequence[float], form: str) -> Sequence[str]:
    return (name, *map(form.format, quartiles(values)))
