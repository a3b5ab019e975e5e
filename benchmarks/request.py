"""What one request costs with this filter, and with Scrapy's own."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from scrapy import Request
from scrapy.dupefilters import BaseDupeFilter, RFPDupeFilter
from scrapy.utils.request import RequestFingerprinter

from benchmarks.shared import samples
from benchmarks.shared.report import Section, Table, at_least, at_most, quartiles
from benchmarks.shared.timing import timed
from scrapy_bloom import BloomDupeFilter

LIMIT, TIMES_FASTER = 1.05, 3.0
NEW, DUPLICATE, REPEATED = "new", "duplicate", "repeated link"
PASSES = (NEW, DUPLICATE, REPEATED)
OURS, OURS_PLAIN, SCRAPYS = "BloomDupeFilter", "BloomDupeFilter, other", "RFPDupeFilter"
NAVIGATION = 300  # links that are on every page


class OtherFingerprinter(RequestFingerprinter):
    """Scrapy's under another name, for which BloomDupeFilter has no faster way."""


def run(quick: bool) -> Section:  # noqa: FBT001 - every benchmark is called like this
    rounds, size = (3, 600) if quick else (20, 15_000)
    times, making = _measured(rounds, size)
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
    rows.append(_row("`Request(url)` itself, µs", making, "{:.2f}"))
    faster = 1 / median(ratios[OURS, REPEATED])
    return Section(
        title="One request",
        method=(
            "`request_seen(request)`, the filters with a JOBDIR and otherwise default settings; "
            f"the requests are made before. {rounds} rounds of {size:,} URLs that were not used "
            f"before. Each round times the filters on the same URLs: as new requests, then as "
            f"duplicates, then {NAVIGATION} of them again and again, as the navigation of a site. "
            "It begins with the next of the filters. Garbage is collected before each timing, and "
            "not within it."
        ),
        checks=[
            at_most("new request, time relative to Scrapy's", median(ratios[OURS, NEW]), LIMIT),
            at_least("repeated link, times faster than Scrapy's", faster, TIMES_FASTER),
        ],
        tables=[Table(("figure", "25 %", "median", "75 %"), rows)],
        notes=(
            "The fingerprint, which any filter needs, is part of all times.\n"
            "BloomDupeFilter computes the fingerprints of Scrapy's RequestFingerprinter itself, "
            "the last used ones: `duplicate` goes through more than these, `repeated link` does "
            "not. With any other fingerprinter it calls that one: the rows 'other' show this with "
            "a subclass that changes nothing."
        ),
    )


def _measured(rounds: int, size: int) -> tuple[dict[tuple[str, str], list[float]], list[float]]:
    """Microseconds per request of each round, by filter and pass; and those of `Request(url)`."""
    times: dict[tuple[str, str], list[float]] = {
        (name, what): [] for name in (OURS, OURS_PLAIN, SCRAPYS) for what in PASSES
    }
    making = []
    with tempfile.TemporaryDirectory() as directory:
        other = {"REQUEST_FINGERPRINTER_CLASS": OtherFingerprinter}
        filters = [
            (OURS, _opened(BloomDupeFilter, Path(directory, "ours"))),
            (OURS_PLAIN, _opened(BloomDupeFilter, Path(directory, "other"), **other)),
            (SCRAPYS, _opened(RFPDupeFilter, Path(directory, "scrapys"))),
        ]
        for number in range(rounds):
            urls = [samples.url(i) for i in range(number * size, (number + 1) * size)]
            asked = {NEW: urls, DUPLICATE: urls, REPEATED: _repeated(urls)}
            for what in PASSES:
                for name, dupefilter in filters:
                    secs, seen = timed(dupefilter.request_seen, list(map(Request, asked[what])))
                    times[name, what].append(secs / size * 1e6)
                    assert seen <= 1 if what == NEW else seen == size, (name, what, seen)
            making.append(timed(lambda url: bool(Request(url)), urls)[0] / size * 1e6)
            filters.append(filters.pop(0))
        for _, dupefilter in filters:
            dupefilter.close("finished")
    return times, making


def _repeated(urls: list[str]) -> list[str]:
    links = urls[:NAVIGATION]
    return links * (len(urls) // len(links))


def _opened(kind: type[BaseDupeFilter], job_dir: Path, **settings: Any) -> BaseDupeFilter:
    dupefilter = kind.from_crawler(samples.crawler(job_dir, **settings))
    dupefilter.open()
    return dupefilter


def _row(name: str, values: Sequence[float], form: str) -> Sequence[str]:
    return (name, *map(form.format, quartiles(values)))
