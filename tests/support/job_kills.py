"""Jobs that are killed at random instants, and resumed: is every page crawled, and how often?"""

import random
import shutil
import signal
import sqlite3
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from scrapy_bloom.queues.job_state import read_counts
from tests.support.example_crawls import ExampleSite, Job, Size, job_that_ends, served
from tests.support.sites import LIMIT

OURS = {
    "SCHEDULER": "scrapy_bloom.CrashSafeScheduler",
    "DUPEFILTER_CLASS": "scrapy_bloom.BloomDupeFilter",
}
SCRAPYS = {
    "SCHEDULER": "scrapy.core.scheduler.Scheduler",
    "DUPEFILTER_CLASS": "scrapy.dupefilters.RFPDupeFilter",
}
# Asked for on every start.
NOT_COUNTED = ("/", "/robots.txt")


@dataclass(frozen=True)
class Usual:
    """An undisturbed crawl."""

    hits: Mapping[str, int]  # requests for each address
    journal: frozenset[str]  # what it noted
    start_secs: float  # from its start to the first request
    close_secs: float  # from the last request to its end

    @property
    def total(self) -> int:
        return sum(self.hits.values())


@dataclass(frozen=True)
class Case:
    """One job, and how it is killed."""

    row: str
    number: int
    signals: Sequence[signal.Signals]
    kills: int = 1
    at: str = "any"  # "open", "close", "middle"
    slow: bool = False
    site_secs: float = 0.0
    settings: Mapping[str, str] = field(default_factory=lambda: OURS)
    quiet_secs: float = LIMIT


@dataclass(frozen=True)
class Kill:
    """One kill.

    Attributes:
        when: in words, and with which exit status.
        pending: requests that waited in the database then, or None if there was none.
        in_flight: those that were in flight.
        asked: what was asked for in this run.
        responses: those of them whose response had come.
    """

    when: str
    pending: int | None
    in_flight: int
    asked: AbstractSet[str]
    responses: AbstractSet[str]

    def __str__(self) -> str:
        if self.pending is None:
            return self.when
        return f"{self.when}, {self.pending} pending, {self.in_flight} in flight"


@dataclass(frozen=True)
class Outcome:
    """What became of a job.

    Attributes:
        case: the job.
        kills: how it was killed.
        has_ended: the resumed crawl ended by itself, and was finished.
        missing: addresses that were never asked for, and what is missing in the journal.
        twice: addresses asked for in the killed run, and again later; for each kill.
        downloading: those of them whose response had not come.
        crawled: different addresses asked for.
    """

    case: Case
    kills: Sequence[Kill]
    has_ended: bool
    missing: Sequence[str]
    twice: Sequence[int]
    downloading: Sequence[int]
    crawled: int

    @property
    def is_complete(self) -> bool:
        """Whether every page was crawled."""
        return not self.missing


def undisturbed(directory: Path, size: Size) -> tuple[Usual, int]:
    """Crawl without a kill; return its figures, and the number of pages of the site."""
    with served(size) as site:
        job = Job(directory, site.url, OURS)
        with job_that_ends(job):
            begun = time.monotonic()
            job.start()
            job.wait_until(lambda: site.total() > 0)
            first = time.monotonic()
            last_total, last = 0, first
            while job.running() and time.monotonic() < begun + LIMIT:
                if (total := site.total()) != last_total:
                    last_total, last = total, time.monotonic()
                time.sleep(0.002)
            ended = time.monotonic()
            assert job.wait() == 0, job.output
        usual = Usual(dict(site.hits), frozenset(job.lines()), first - begun, ended - last)
        items = sum(line.startswith("item ") for line in usual.journal)
        assert items == site.pages, f"{items} of {site.pages} pages\n{job.output}"
        assert set(usual.hits.values()) == {1}, usual.hits
        return usual, items


def disturbed(directory: Path, size: Size, usual: Usual, seed: int, case: Case) -> Outcome:
    """Start a job, kill it, resume it; again if it ended before it was to be killed."""
    for attempt in range(20):
        name = f"{case.row}-{case.number}-{attempt}"
        rng = random.Random(f"{seed} {name}")
        with served(size, case.site_secs) as site:
            job = Job(directory / name.replace(" ", "-"), site.url, case.settings, slow=case.slow)
            with job_that_ends(job):
                kills = _killed(job, site, usual, case, rng)
                if not kills:
                    continue
                job.start()
                status = job.wait(site.total, case.quiet_secs)
            has_ended = status == 0 and "Spider closed (finished)" in job.output
            hits = Counter(site.hits)
        missing = sorted(set(usual.hits) - set(hits)) + sorted(usual.journal - set(job.lines()))
        twice, downloading = _asked_again(kills, hits)
        return Outcome(case, kills, has_ended, missing, twice, downloading, len(hits))
    raise TimeoutError(f"{case} ended before each kill")


def _asked_again(
    kills: Sequence[Kill], hits: Mapping[str, int]
) -> tuple[Sequence[int], Sequence[int]]:
    """Count, for each kill, the requests of the killed run that were sent again later.

    And how much of that was without a response. What is asked for twice in one run, which nothing
    should be, is counted with the last kill.
    """
    twice, downloading = [], []
    later = Counter({each: n for each, n in hits.items() if each not in NOT_COUNTED})
    surplus = later.total() - len(later)
    for kill in kills:
        later.subtract(kill.asked)
        again = {each for each in kill.asked if later[each] > 0}
        twice.append(len(again))
        downloading.append(len(again - kill.responses))
    twice[-1] += surplus - sum(twice)
    return twice, downloading


def _killed(
    job: Job, site: ExampleSite, usual: Usual, case: Case, rng: random.Random
) -> Sequence[Kill]:
    """Start and kill a job, as often as it is to be."""
    kills: list[Kill] = []
    low, high = (0.05, 0.95) if case.at == "middle" else (-0.1, 1.1)
    for fraction in sorted(rng.uniform(low, high) for _ in range(case.kills)):
        before, hits = time.monotonic(), Counter(site.hits)
        job.start()
        match case.at:
            case "open":
                reached = job.wait_until((job.job_dir / "requests.sqlite").exists)
                time.sleep(rng.uniform(0, 0.02))
            case "close":
                reached = job.wait_until(lambda: "Closing spider" in job.output)
                time.sleep(rng.uniform(0, usual.close_secs / 2))
            case _:
                reached = _wait_for(fraction, job, site, usual, rng)
        if not (reached and job.running()):
            job.wait()
            break
        at = f"after {site.total():,} requests, {time.monotonic() - before:.2f} s"
        job.send(case.signals[0])
        for number in case.signals[1:]:
            time.sleep(rng.uniform(0, 0.05))
            job.send(number)
        when = f"{at}, status {job.wait()}"
        copy = _copied(job, len(kills)) / "requests.sqlite"
        pending, in_flight = read_counts(copy) if _is_ready(copy) else (None, 0)
        site.settle()  # it still reads what it was asked for
        asked = set(site.hits - hits).difference(NOT_COUNTED)
        kills.append(Kill(when, pending, in_flight, asked, job.responses()))
    return kills


def _wait_for(
    fraction: float, job: Job, site: ExampleSite, usual: Usual, rng: random.Random
) -> bool:
    """Wait until that part of a crawl is over: below 0 it starts, above 1 it closes."""
    if fraction < 0 or site.total() >= fraction * usual.total:  # by a run before this one
        time.sleep(rng.uniform(0, usual.start_secs))
        return True
    reached = job.wait_until(lambda: site.total() >= min(fraction, 1) * usual.total)
    time.sleep(rng.uniform(0, usual.close_secs if fraction > 1 else 0.02))
    return reached


def _copied(job: Job, number: int) -> Path:
    """Copy what a kill left, which is kept if a page is missing in the end."""
    copy = job.job_dir.with_name(f"killed-{number}")
    if job.job_dir.exists():
        shutil.copytree(job.job_dir, copy)
    return copy


def _is_ready(database: Path) -> bool:
    """Return whether the database had its table when the crawl was killed."""
    if not database.exists():
        return False
    with closing(sqlite3.connect(database)) as db:
        return bool(db.execute("SELECT 1 FROM sqlite_master WHERE name = 'requests'").fetchone())
