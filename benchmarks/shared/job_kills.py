"""Jobs that are killed at random instants, and resumed: is every page crawled, and how often?"""

import json
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scrapy.utils.defer import maybe_deferred_to_future
from twisted.internet.task import deferLater

from scrapy_bloom.exceptions import StorageError
from tests.support.crawls import Crawl, are_finished, is_reached
from tests.support.example_crawls import ExampleSite, Job, Journal, Size, Usual
from tests.support.request_queues import counts_in
from tests.support.sites import LIMIT

OURS = {
    "SCHEDULER": "scrapy_bloom.CrashSafeScheduler",
    "DUPEFILTER_CLASS": "scrapy_bloom.BloomDupeFilter",
}
SCRAPYS = {
    "SCHEDULER": "scrapy.core.scheduler.Scheduler",
    "DUPEFILTER_CLASS": "scrapy.dupefilters.RFPDupeFilter",
}
PIPELINE_SECS = 0.1
# Asked for on every start.
NOT_COUNTED = ("/", "/robots.txt")


class SlowJournal(Journal):
    """Keeps each item in the pipeline for a while."""

    async def process_item(self, item: Mapping[str, Any]) -> Any:
        """Let the item pass after a while."""
        from twisted.internet import reactor  # noqa: PLC0415 - the crawl chooses it

        await maybe_deferred_to_future(deferLater(reactor, PIPELINE_SECS))
        return super().process_item(item)


_SLOW = {"ITEM_PIPELINES": json.dumps({f"{__name__}.SlowJournal": 1})}


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
    """One kill."""

    when: str  # in words, and with which exit status
    in_flight: int  # requests
    asked: AbstractSet[str]  # in this run
    responses: AbstractSet[str]  # of what was asked for


@dataclass(frozen=True)
class Outcome:
    """What became of a job."""

    case: Case
    kills: Sequence[Kill]
    has_ended: bool  # the resumed crawl ended by itself, and was finished
    missing: Sequence[str]  # addresses that were never asked for, and lines of the journal
    twice: Sequence[int]  # addresses asked for in the killed run, and again later; for each kill
    downloading: Sequence[int]  # those of them whose response had not come
    crawled: int  # different addresses

    @property
    def is_complete(self) -> bool:
        """Whether every page was crawled."""
        return not self.missing


def disturbed(directory: Path, size: Size, usual: Usual, seed: int, case: Case) -> Outcome:
    """Start a job, kill it, resume it; again if it ended before it was to be killed."""
    for attempt in range(20):
        name = f"{case.row}-{case.number}-{attempt}"
        rng = random.Random(f"{seed} {name}")
        with ExampleSite(size, case.site_secs) as site:
            settings = {**case.settings, **(_SLOW if case.slow else {})}
            job = Job(directory / name.replace(" ", "-"), site.url, settings)
            kills = _killed(job, site, usual, case, rng)
            if not kills:
                continue
            has_ended = are_finished([job.start()], site.total, case.quiet_secs)
            hits = Counter(site.hits)
        missing = sorted(usual.addresses - set(hits)) + sorted(usual.journal - set(job.lines()))
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
    later = Counter({hit: n for hit, n in hits.items() if hit not in NOT_COUNTED})
    surplus = later.total() - len(later)
    for kill in kills:
        later.subtract(kill.asked)
        again = {entry for entry in kill.asked if later[entry] > 0}
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
        run = job.start()
        match case.at:
            case "open":
                reached = is_reached((job.job_dir / "bloom.sqlite").exists, [run])
                time.sleep(rng.uniform(0, 0.02))
            case "close":
                reached = is_reached(lambda: "Closing spider" in run.output, [run])  # noqa: B023
                time.sleep(rng.uniform(0, usual.close_secs / 2))
            case _:
                reached = _wait_for(fraction, run, site, usual, rng)
        if not (reached and run.running()):
            run.finish()
            break
        at = f"after {site.total():,} requests, {time.monotonic() - before:.2f} s"
        run.send(case.signals[0])
        for number in case.signals[1:]:
            time.sleep(rng.uniform(0, 0.05))
            run.send(number)
        when = f"{at}, status {run.finish()}"
        in_flight = _in_flight(job, len(kills))
        site.settle()  # it still reads what it was asked for
        asked = set(site.hits - hits).difference(NOT_COUNTED)
        kills.append(Kill(when, in_flight, asked, job.responses()))
    return kills


def _wait_for(
    fraction: float, run: Crawl, site: ExampleSite, usual: Usual, rng: random.Random
) -> bool:
    """Wait until that part of a crawl is over: below 0 it starts, above 1 it closes."""
    total = len(usual.addresses)
    if fraction < 0 or site.total() >= fraction * total:  # by a run before this one
        time.sleep(rng.uniform(0, usual.start_secs))
        return True
    reached = is_reached(lambda: site.total() >= min(fraction, 1) * total, [run])
    time.sleep(rng.uniform(0, usual.close_secs if fraction > 1 else 0.02))
    return reached


def _in_flight(job: Job, number: int) -> int:
    """Return how many requests are in flight, in a copy that is kept if a page is missing."""
    copy = job.job_dir.with_name(f"killed-{number}")
    if not job.job_dir.exists():
        return 0
    shutil.copytree(job.job_dir, copy)
    try:
        return counts_in(copy / "bloom.sqlite")[1]
    except StorageError:  # it was killed before there was a table
        return 0
