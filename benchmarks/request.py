"""What one request costs with this filter, and with Scrapy's own."""

import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from scrapy import Request
from scrapy.dupefilters import BaseDupeFilter, RFPDupeFilter
from scrapy.utils.request import RequestFingerprinter

from benchmarks.shared import samples
from benchmarks.shared.machine import timed
from benchmarks.shared.report import Check, Section, Table, at_most, quartiles
from scrapy_bloom import BloomDupeFilter
from scrapy_bloom.crawl.fingerprinting import plain_fingerprint

NEW, DUPLICATE, REPEATED = "new", "duplicate", "repeated link"
PASSES = (NEW, DUPLICATE, REPEATED)
OURS, OTHER, SCRAPYS = "BloomDupeFilter", "BloomDupeFilter, other", "RFPDupeFilter"
NAVIGATION = 300  # links that are on every page

PLAIN, OUTSIDE = "plain", "outside"
QUERIES = ("1 parameter", "2 parameters", "3 parameters")
_PAIRS = ("sort=price", "page={}", "ref=list")
LIMITS = {
    (PLAIN, NEW): 0.24,
    (PLAIN, DUPLICATE): 0.22,
    (PLAIN, REPEATED): 0.12,
    (OUTSIDE, NEW): 1.03,
    (OUTSIDE, DUPLICATE): 1.03,
}
LIMIT_OF_QUERIES, LIMIT_OF_OTHERS = 0.22, 1.05


class OtherFingerprinter(RequestFingerprinter):
    """Scrapy's under another name, for which BloomDupeFilter has no faster way."""


def _url(kind: str, number: int) -> str:
    if kind == OUTSIDE:
        return samples.url(number).replace("page=", "path=/")
    url = samples.url(number).partition("?")[0]
    pairs = _PAIRS[: QUERIES.index(kind) + 1] if kind in QUERIES else ()
    return f"{url}?{'&'.join(pairs).format(number % 50)}" if pairs else url


KINDS = (PLAIN, *QUERIES, OUTSIDE)
Times = Mapping[tuple[str, str, str], Sequence[float]]  # by kind of URL, pass and filter


def run(quick: bool) -> Section:  # noqa: FBT001 - every benchmark is called like this
    rounds, size = (3, 600) if quick else (15, 5_000)
    times, making = _measured(rounds, size)
    return Section(
        title="One request",
        method=(
            "`request_seen(request)`, the filters with a JOBDIR and otherwise default settings; "
            f"the requests are made before. {rounds} rounds of {size:,} URLs of each kind that "
            "were not used before. Each round times the filters on the same URLs: as new requests, "
            f"then as duplicates, then {NAVIGATION} of them again and again, as the navigation of "
            "a site. It begins with the next of the filters. Garbage is collected before each "
            f"timing, and not within it. With w3lib {version('w3lib')}."
        ),
        checks=list(_checks(times)),
        tables=[
            Table(
                ("URLs", "request", f"{SCRAPYS}, µs", f"{OURS}, µs", "25 %", "ratio", "75 %"),
                [_row(times, kind, what, OURS) for kind in KINDS for what in PASSES],
            ),
            Table(
                ("URLs", "request", f"{SCRAPYS}, µs", f"{OTHER}, µs", "25 %", "ratio", "75 %"),
                [_row(times, kind, what, OTHER) for kind in KINDS for what in PASSES],
            ),
            Table(
                ("figure", "25 %", "median", "75 %"),
                [("`Request(url)` itself, µs", *map("{:.2f}".format, quartiles(making)))],
            ),
        ],
        notes=(
            "The fingerprint, which any filter needs, is part of all times. BloomDupeFilter "
            "computes those of Scrapy's RequestFingerprinter itself: of plain URLs, with up to 3 "
            "parameters here, without canonicalize_url; of those outside (their query has a slash "
            "in it) with it. How long that takes depends on w3lib: its 2.5.0 takes a quarter to a "
            "half of the time of its 2.4.0, which leaves a smaller share to be saved.\n"
            "`repeated link` is what LocalBackend remembers to have been asked for twice.\n"
            "With any other fingerprinter, the filter calls that one: the second table shows it "
            "with a subclass that changes nothing. The rest is the filter: 30 bits of a file in "
            "place of a look into a set, by code that somebody else's 20 µs have driven from the "
            "processor's caches."
        ),
    )


def _checks(times: Times) -> Sequence[Check]:
    def ratio(kind: str, what: str) -> float:
        return median(_ratios(times, kind, what, OURS))

    checks = [
        at_most(f"{kind} URL, {what}, time relative to Scrapy's", ratio(kind, what), limit)
        for (kind, what), limit in LIMITS.items()
    ]
    for what in (NEW, DUPLICATE):
        of_queries = median(ratio(kind, what) for kind in QUERIES)
        name = f"URL with 1 to 3 parameters, {what}, time relative to Scrapy's"
        checks.append(at_most(name, of_queries, LIMIT_OF_QUERIES))
    others = median(ratio for kind in KINDS for ratio in _ratios(times, kind, NEW, OTHER))
    name = "other fingerprinter, new, time relative to Scrapy's"
    return [*checks, at_most(name, others, LIMIT_OF_OTHERS)]


def _ratios(times: Times, kind: str, what: str, name: str) -> list[float]:
    pairs = zip(times[kind, what, name], times[kind, what, SCRAPYS], strict=True)
    return [ours / scrapys for ours, scrapys in pairs]


def _row(times: Times, kind: str, what: str, name: str) -> Sequence[str]:
    micros = [f"{median(times[kind, what, entry]):.2f}" for entry in (SCRAPYS, name)]
    return (kind, what, *micros, *map("{:.3f}".format, quartiles(_ratios(times, kind, what, name))))


def _measured(rounds: int, size: int) -> tuple[Times, list[float]]:
    """Microseconds per request of each round; and those of `Request(url)`."""
    times: dict[tuple[str, str, str], list[float]] = {}
    making = []
    with tempfile.TemporaryDirectory() as directory:
        other = {"REQUEST_FINGERPRINTER_CLASS": OtherFingerprinter}
        filters = [
            (OURS, _opened(BloomDupeFilter, Path(directory, "ours"))),
            (OTHER, _opened(BloomDupeFilter, Path(directory, "other"), **other)),
            (SCRAPYS, _opened(RFPDupeFilter, Path(directory, "scrapys"))),
        ]
        for number in range(rounds):
            for kind in KINDS:
                urls = [_url(kind, i) for i in range(number * size, (number + 1) * size)]
                assert (plain_fingerprint(urls[0]) is None) is (kind == OUTSIDE)
                asked = {NEW: urls, DUPLICATE: urls, REPEATED: _repeated(urls)}
                for what in PASSES:
                    for name, dupefilter in filters:
                        requests = list(map(Request, asked[what]))
                        secs, seen = timed(dupefilter.request_seen, requests)
                        times.setdefault((kind, what, name), []).append(secs / size * 1e6)
                        assert seen <= 1 if what == NEW else seen == size, (name, what, seen)
                making.append(timed(lambda url: bool(Request(url)), urls)[0] / size * 1e6)
            filters.append(filters.pop(0))
        for _, dupefilter in filters:
            dupefilter.close("finished")
    return times, making


def _repeated(urls: list[str]) -> list[str]:
    links = urls[:NAVIGATION]
    return (links * (len(urls) // len(links) + 1))[: len(urls)]


def _opened(kind: type[BaseDupeFilter], job_dir: Path, **settings: Any) -> BaseDupeFilter:
    dupefilter = kind.from_crawler(samples.crawler(job_dir, **settings))
    dupefilter.open()
    return dupefilter
