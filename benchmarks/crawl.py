"""Whole crawls of two real sites, and of made-up ones, with this filter and with Scrapy's own."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from scrapy import Request, Spider

from benchmarks.shared.crawls import HOST, Crawled, FollowSpider, RuleSpider, TreeSpider, crawl
from benchmarks.shared.distant import DistantServer
from benchmarks.shared.report import Check, Section, Table, at_least, at_most, quartiles
from scrapy_bloom import BloomDupeFilter
from tests.support.servers import PROGRAMS, Server
from tests.support.worker_faults import settings_of

DOCS = Path("/usr/share/doc")
SERVER_SECS = 0.001  # the distance of the server
LEASE_SECS = 60
OUR_FILTER = {"DUPEFILTER_CLASS": "scrapy_bloom.BloomDupeFilter"}


class LongWayFilter(BloomDupeFilter):
    """A filter that overrides `request_seen`, so that no duplicate leaves at the door."""

    def request_seen(self, request: Request) -> bool:
        """Return whether the request is a duplicate."""
        return super().request_seen(request)


@dataclass(frozen=True)
class Case:
    """One crawl with two contenders.

    Attributes:
        name: of the crawl, and of our contender if it is not the filter in memory.
        spider: its class.
        arguments: of the spider.
        figure: what the promise is about: the processor's time relative to the other's, how many
            times as fast as the other, or milliseconds of the longest gap of the event loop more
            than the other's.
        limit: of that figure; None if nothing is promised.
        ours: settings of our contender.
        other: settings of the other one; by default, it is Scrapy's filter in memory.
        files: the site's directory; None for a site that the spider makes up.
    """

    name: str
    spider: type[Spider]
    arguments: Mapping[str, object]
    figure: Literal["CPU", "speed", "gap"]
    limit: float | None
    ours: Mapping[str, object] = field(default_factory=lambda: OUR_FILTER)
    other: Mapping[str, object] = field(default_factory=dict)
    files: Path | None = None

    def run(self, settings: Mapping[str, object]) -> Crawled:
        """Crawl with one contender."""
        settings = {"SITE_FILES": self.files and str(self.files), **settings}
        watches_loop = self.figure == "gap"
        return crawl(self.spider, self.arguments, settings, watches_loop=watches_loop)

    def check(self, pairs: Sequence[tuple[Crawled, Crawled]]) -> Iterator[Check]:
        """Compare the median over all rounds with the limit."""
        if self.limit is None:
            return
        if self.figure == "CPU":
            measured = statistics.median(_cpu_ratios(pairs))
            yield at_most(f"{self.name}: CPU, relative", measured, self.limit)
        elif self.figure == "speed":
            measured = 1 / statistics.median(_time_ratios(pairs))
            yield at_least(f"{self.name}: times as fast", measured, self.limit, "{:.2f}")
        else:
            gaps = (ours.longest_gap_ms - other.longest_gap_ms for ours, other in pairs)
            measured = statistics.median(gaps)
            yield at_most(f"{self.name}: ms more without the loop", measured, self.limit, "{:.0f}")


def run(quick: bool, rounds: int | None = None, only: str = "") -> Section:  # noqa: FBT001 - every benchmark is called like this
    """Measure.

    Args:
        quick: with small sizes.
        rounds: by default, 1 or 5.
        only: a part of the names of the crawls to run.
    """
    rounds = rounds or (1 if quick else 5)
    with ExitStack() as stack:
        server = stack.enter_context(Server(next(iter(PROGRAMS))))
        distant = DistantServer(server.port, SERVER_SECS)
        stack.callback(distant.end)
        cases = [case for case in _cases(distant.port, quick=quick) if only in case.name]
        missing = [str(case.files) for case in cases if case.files and not case.files.is_dir()]
        cases = [case for case in cases if str(case.files) not in missing]
        pairs: dict[str, list[tuple[Crawled, Crawled]]] = {case.name: [] for case in cases}
        for number in range(rounds):
            for case in cases:
                with server.client as client:
                    client.flushall()
                pairs[case.name].append(_in_turn(case, ours_first=number % 2 == 0))
    return Section(
        title="A whole crawl",
        method=(
            "Crawls of Python's and Django's documentation (Debian's packages python3-doc and "
            "python-django-doc) and of made-up sites, whose spider makes up the links, too, so "
            "that nothing is parsed. A download handler answers in the crawl's process, at once. "
            "Each crawl is a process of its own; two contenders take turns, and who begins "
            f"changes; {rounds} round{'s' if rounds > 1 else ''}. A ratio is that of the two "
            "crawls of one round, and both have crawled as many pages and filtered as many "
            "duplicates. CPU is the user and system time of the whole process, and time that of "
            "the clock, from the start of the crawler to its end. If nothing else is said, "
            "DUPEFILTER_CLASS is all that differs, nothing is on disk, and the log has warnings "
            "only. Redis is Valkey here, behind a proxy that makes a round trip take 1 ms."
        ),
        checks=[check for case in cases for check in case.check(pairs[case.name])],
        tables=[
            Table(
                (
                    *("", "pages", "duplicates", "other's CPU, s"),
                    *("CPU, relative: 25 %", "median", "75 %"),
                    *("time, relative: 25 %", "median", "75 %"),
                ),
                [_row(name, crawls) for name, crawls in pairs.items()],
            ),
            *(_gaps(case, pairs[case.name]) for case in cases if case.figure == "gap"),
        ],
        notes="\n".join(
            (
                f"follow_all: `response.follow_all(css='{FollowSpider.links}')`.",
                "CrawlSpider: a rule with a LinkExtractor, which drops links that a page repeats.",
                "Both have `allowed_domains`, and the sites' links to others are dropped.",
                "The other contender is Scrapy's filter and scheduler, in memory or in a JOBDIR.",
                (
                    "Of the site without known links, the other contender is our own filter in a "
                    "subclass that overrides `request_seen`, so that it does without the door."
                ),
                *(f"{directory} is missing: not measured." for directory in sorted(set(missing))),
            )
        ),
    )


def _cases(port: int, *, quick: bool) -> Iterator[Case]:
    docs = {
        "python3-doc": DOCS / "python3-doc/html" / ("tutorial" if quick else ""),
        "Django": DOCS / "python-django-doc/html" / ("intro" if quick else ""),
    }
    index = {"start_urls": [f"http://{HOST}/index.html"]}
    for site, spider, limit in (
        ("python3-doc", FollowSpider, 0.50),
        ("python3-doc", RuleSpider, 0.72),
        ("Django", FollowSpider, 0.76),
        ("Django", RuleSpider, 0.85),
    ):
        kind = "follow_all" if spider is FollowSpider else "CrawlSpider"
        yield Case(f"{site}, {kind}", spider, index, "CPU", limit, files=docs[site])
    yield Case(
        "50 known links a page",
        TreeSpider,
        {"new": 1, "known": 50, "pages": 200 if quick else 3_000},
        "CPU",
        None,
    )
    yield Case(
        "no known links",
        TreeSpider,
        {"new": 10, "known": 0, "pages": 200 if quick else 6_000},
        "CPU",
        1.01,
        other={"DUPEFILTER_CLASS": "benchmarks.crawl.LongWayFilter"},
    )
    yield Case(
        "python3-doc, follow_all, CrashSafeScheduler in a JOBDIR",
        FollowSpider,
        index,
        "speed",
        1.1,
        ours={**OUR_FILTER, "SCHEDULER": "scrapy_bloom.CrashSafeScheduler", "JOBDIR": "job"},
        other={"JOBDIR": "job"},
        files=docs["python3-doc"],
    )
    yield Case(
        "20 new and 20 known links a page, CrashSafeScheduler in Redis, 1 ms away",
        TreeSpider,
        {"new": 20, "known": 20, "most": 50 if quick else 2_000},
        "speed",
        1.3,
        ours=settings_of(
            f"redis://127.0.0.1:{port}/0",
            100_000,
            BLOOM_QUEUE_LEASE_SECS=LEASE_SECS,
            LOG_LEVEL="WARNING",
        ),
    )
    known = 5_000 if quick else 100_000
    yield Case(
        f"{known:,} known links of one callback",
        TreeSpider,
        {"new": 0, "known": known, "pages": 2, "menu": 1},
        "gap",
        50.0,
    )


def _in_turn(case: Case, *, ours_first: bool) -> tuple[Crawled, Crawled]:
    if ours_first:
        ours, other = case.run(case.ours), case.run(case.other)
    else:
        other, ours = case.run(case.other), case.run(case.ours)
    assert ours.pages == other.pages, (case, ours, other)
    # A LinkExtractor finds one link more or less in a page whose own URL has a fragment, and which
    # URL of a page is crawled first depends on the order: Scrapy's own number varies, too.
    assert abs(ours.duplicates - other.duplicates) <= other.duplicates / 1000, (case, ours, other)
    return ours, other


def _cpu_ratios(pairs: Sequence[tuple[Crawled, Crawled]]) -> list[float]:
    return [ours.cpu_secs / other.cpu_secs for ours, other in pairs]


def _time_ratios(pairs: Sequence[tuple[Crawled, Crawled]]) -> list[float]:
    return [ours.secs / other.secs for ours, other in pairs]


def _row(name: str, pairs: Sequence[tuple[Crawled, Crawled]]) -> Sequence[str]:
    _, other = pairs[0]
    others_secs = statistics.median(other.cpu_secs for _, other in pairs)
    ratios = (*quartiles(_cpu_ratios(pairs)), *quartiles(_time_ratios(pairs)))
    counts = (f"{other.pages:,}", f"{other.duplicates:,}", f"{others_secs:.2f}")
    return (name, *counts, *(f"{ratio:.3f}" for ratio in ratios))


def _gaps(case: Case, pairs: Sequence[tuple[Crawled, Crawled]]) -> Table:
    gaps = zip(*((ours.longest_gap_ms, other.longest_gap_ms) for ours, other in pairs), strict=True)
    return Table(
        (f"{case.name}: longest gap of the event loop, ms", "25 %", "median", "75 %"),
        [
            (contender, *(f"{gap:.0f}" for gap in quartiles(values)))
            for contender, values in zip(("BloomDupeFilter", "Scrapy's"), gaps, strict=True)
        ],
    )
