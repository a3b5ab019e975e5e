"""What one request costs with this filter, and with Scrapy's own."""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from scrapy import Request
from scrapy.dupefilters import BaseDupeFilter, RFPDupeFilter
from scrapy.utils.request import RequestFingerprinter

from benchmarks import samples
from benchmarks.report import Section, Table, at_most, quartiles
from benchmarks.timing import timed
from scrapy_bloom import BloomDupeFilter

LIMIT = 1.05
PASSES = ("new", "duplicate")
OURS, OURS_PLAIN, SCRAPYS = "BloomDupeFilter", "BloomDupeFilter, other", "RFPDupeFilter"


class OtherFingerprinter(RequestFingerprinter):
    """Scrapy's under another name, for which BloomDupeFilter has no faster way."""


def run(quick: bool) -> Section:  # noqa: FBT001 - every benchmark is called like this
    rounds, size = (3, 500) if quick else (20, 15_000)
    times = _measured(rounds, size)
    ratios, rows = {}, []
    for what in PASSES:
        scrapys = times[SCRAPYS, what]
        rows.append(_row(f"{what}: {SCRAPYS}, µs", scrapys, "{:.2f}"))
        for name in (OURS, OURS_PLAIN):
            ours = times[name, what]
            pairs = zip(ours, scrapys, strict=True)
            ratios[name, what] = [mine / theirs for mine, theirs in pairs]
            rows += [
                _row(f"{what}: {name}, µs", ours, "{:.2f}"),
                _row(f"{what}: {name}, ratio in one round", ratios[name, what], "{:.3f}"),
            ]
    return Section(
        title="One request",
        method=(
            "`Request(url)` and `request_seen(request)`, the filters with a JOBDIR and otherwise "
            f"default settings. {rounds} rounds of {size:,} URLs that were not used before. Each "
            "round times the filters on the same URLs, as new requests and then as duplicates, "
            "and begins with the next of them. Garbage is collected before each timing, and not "
            "within it."
        ),
        checks=[
            at_most("new requests, time relative to Scrapy's", median(ratios[OURS, "new"]), LIMIT)
        ],
        tables=[Table(("figure", "25 %", "median", "75 %"), rows)],
        notes=(
            "`Request(url)` and its fingerprint, which any filter needs, are part of all times.\n"
            "BloomDupeFilter computes the fingerprints of Scrapy's RequestFingerprinter itself, "
            "with the same results in less time. With any other fingerprinter it calls that one: "
            "the rows 'other' show this with a subclass that changes nothing."
        ),
    )


def _measured(rounds: int, size: int) -> dict[tuple[str, str], list[float]]:
    """Microseconds per request of each round, by filter and pass."""
    times: dict[tuple[str, str], list[float]] = {
        (name, what): [] for name in (OURS, OURS_PLAIN, SCRAPYS) for what in PASSES
    }
    with tempfile.TemporaryDirectory() as directory:
        other = {"REQUEST_FINGERPRINTER_CLASS": OtherFingerprinter}
        filters = [
            (OURS, _opened(BloomDupeFilter, Path(directory, "ours"))),
            (OURS_PLAIN, _opened(BloomDupeFilter, Path(directory, "other"), **other)),
            (SCRAPYS, _opened(RFPDupeFilter, Path(directory, "scrapys"))),
        ]
        for number in range(rounds):
            urls = [samples.url(i) for i in range(number * size, (number + 1) * size)]
            for what in PASSES:
                for name, dupefilter in filters:
                    secs, seen = timed(_request(dupefilter), urls)
                    times[name, what].append(secs / size * 1e6)
                    assert seen == size if what == "duplicate" else seen <= 1, (name, seen)
            filters.append(filters.pop(0))
        for _, dupefilter in filters:
            dupefilter.close("finished")
    return times


def _request(dupefilter: BaseDupeFilter) -> Callable[[str], bool]:
    request_seen = dupefilter.request_seen

    def request(url: str) -> bool:
        return request_seen(Request(url))

    return request


def _opened(kind: type[BaseDupeFilter], job_dir: Path, **settings: Any) -> BaseDupeFilter:
    dupefilter = kind.from_crawler(samples.crawler(job_dir, **settings))
    dupefilter.open()
    return dupefilter


def _row(name: str, values: Sequence[float], form: str) -> Sequence[str]:
    return (name, *map(form.format, quartiles(values)))
