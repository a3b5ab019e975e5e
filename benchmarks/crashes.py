"""Crawls that are killed at random instants, and resumed: is every page crawled, and how often?"""

import secrets
import shutil
import signal
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import mean

from benchmarks.shared.job_kills import (
    OURS,
    PIPELINE_SECS,
    SCRAPYS,
    Case,
    Outcome,
    disturbed,
)
from benchmarks.shared.report import Section, Table, all_of, at_most
from tests.support.example_crawls import (
    CONCURRENT_REQUESTS,
    PART,
    TINY,
    WHOLE,
    ExampleSite,
    undisturbed,
)
from tests.support.processes import do_not_ignore

SITE_SECS = 0.05
AT_ONCE = 2
_KILL, _TERM, _HUP = [signal.SIGKILL], [signal.SIGTERM] * 2, [signal.SIGHUP]
_SIGNALS = (("SIGKILL", _KILL), ("SIGTERM twice", _TERM), ("SIGHUP", _HUP))
_FIVE, _OPEN, _CLOSE = "SIGKILL, five in one job", "SIGKILL in open()", "SIGKILL while closing"
_SLOW = f"SIGKILL, items take {1000 * PIPELINE_SECS:.0f} ms"
_FAR = f"SIGKILL, answers take {1000 * SITE_SECS:.0f} ms"
_SCRAPYS = "Scrapy's own"


def run(quick: bool) -> Section:  # noqa: FBT001 - every benchmark is called like this
    size = TINY if quick else PART
    each, few = (1, 1) if quick else (20, 5)
    seed = secrets.randbelow(10**6)
    cases = [Case(name, number, signals) for number in range(each) for name, signals in _SIGNALS]
    cases += [Case(_FIVE, number, _KILL, kills=2 if quick else 5) for number in range(few)]
    cases += [Case(_OPEN, number, _KILL, at="open") for number in range(few)]
    cases += [Case(_CLOSE, number, _KILL, at="close") for number in range(few)]
    cases += [Case(_SLOW, number, _KILL, at="middle", slow=True) for number in range(few)]
    cases += [Case(_FAR, number, _KILL, at="middle", site_secs=SITE_SECS) for number in range(few)]
    scrapys = [
        Case(_SCRAPYS, n, _KILL, at="middle", settings=SCRAPYS, quiet_secs=2 if quick else 10)
        for n in range(few)
    ]
    directory = Path(tempfile.mkdtemp(prefix="crashes-"))  # kept if anything is wrong
    do_not_ignore(signal.SIGHUP, signal.SIGTERM)
    with ExampleSite(size) as site:
        usual = undisturbed(site, directory / "usual", OURS)
    work = partial(disturbed, directory, size, usual, seed)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        outcomes = list(pool.map(work, cases))
        theirs = list(pool.map(work, scrapys))
    wrong = [outcome for outcome in outcomes if not (outcome.is_complete and outcome.has_ended)]
    if not wrong:
        shutil.rmtree(directory)
    at_random = [outcome for outcome in outcomes if outcome.case.row in dict(_SIGNALS)]
    return Section(
        title="Kills",
        method=(
            f"Crawls of the example site with CrashSafeScheduler and BloomDupeFilter, here with "
            f"{size.sections} of {WHOLE.sections} sections: {site.pages:,} pages, and "
            f"{len(usual.addresses):,} requests with redirects and errors. {len(at_random)} jobs "
            "are killed at a random instant, from the start of the process to its end: the number "
            "of requests answered so far is drawn, and up to 20 ms on top; SIGTERM is sent again "
            "up to 50 ms later, which is Scrapy's unclean shutdown. The same command then resumes "
            "each. The site is served and the requests are counted by the benchmark, which is not "
            "killed. A page is crawled when it was asked for, its callback ran to the end, and its "
            "item passed the pipeline."
        ),
        checks=[
            all_of(
                f"of {len(at_random)} jobs killed at random, with every page crawled",
                sum(entry.is_complete for entry in at_random),
                len(at_random),
            ),
            all_of(
                "resumed crawls that end",
                sum(entry.has_ended for entry in at_random),
                len(at_random),
            ),
            at_most(
                "pages crawled twice for a kill whose response was not there yet, the most",
                max(n for entry in at_random for n in entry.downloading),
                CONCURRENT_REQUESTS,
                "{:.0f}",
            ),
            all_of(
                "kills after which no more was crawled twice than was in flight",
                sum(
                    again <= kill.in_flight
                    for outcome in outcomes
                    for again, kill in zip(outcome.twice, outcome.kills, strict=True)
                ),
                sum(len(outcome.kills) for outcome in outcomes),
            ),
            all_of(
                "of the other jobs, every page crawled, and the resumed crawl ends",
                sum(e.is_complete and e.has_ended for e in outcomes if e not in at_random),
                len(outcomes) - len(at_random),
            ),
        ],
        tables=[
            _table(outcomes),
            Table(
                ("Scrapy's Scheduler and RFPDupeFilter", "requested in the end", "resumed crawl"),
                [
                    (
                        f"SIGKILL {their.kills[0].when}",
                        f"{their.crawled:,} of {len(usual.addresses):,} addresses",
                        "finished" if their.has_ended else "did not finish",
                    )
                    for their in theirs
                ],
            ),
        ],
        notes=_notes(seed, directory, wrong),
    )


def _notes(seed: int, directory: Path, wrong: Sequence[Outcome]) -> str:
    notes = (
        f"CONCURRENT_REQUESTS is {CONCURRENT_REQUESTS}. The home page and robots.txt, which are "
        "asked for at each start, are not counted as crawled twice.\n"
        "What is in flight was taken from the queue, and is being downloaded, in its callback, or "
        "its items in the pipelines: Scrapy downloads CONCURRENT_REQUESTS at a time, and takes "
        "more while the responses of others wait for their callbacks. The resumed crawl asks for "
        "all of it again. The column 'without a response' is the part of it whose response had "
        "not come.\n"
        "Scrapy's resumed crawl is ended once it has asked for nothing for 10 seconds.\n"
        f"The instants were drawn with the seed {seed}."
    )
    cases = ", ".join(f"{entry.case.row} {entry.case.number}" for entry in wrong)
    return f"{notes}\nWrong: {cases}; all is in {directory}." if wrong else notes


def _table(outcomes: Sequence[Outcome]) -> Table:
    rows = []
    for name in dict.fromkeys(outcome.case.row for outcome in outcomes):
        these = [outcome for outcome in outcomes if outcome.case.row == name]
        twice = [n for entry in these for n in entry.twice]
        rows.append(
            (
                name,
                f"{len(these)}",
                f"{sum(entry.is_complete for entry in these)}",
                f"{sum(entry.has_ended for entry in these)}",
                f"{max(twice)}",
                f"{mean(twice):.1f}",
                f"{max(n for entry in these for n in entry.downloading)}",
                f"{max(kill.in_flight for entry in these for kill in entry.kills)}",
            )
        )
    head = (
        *("kill", "jobs", "every page", "ended", "twice per kill, most", "mean"),
        *("without a response, most", "in flight, most"),
    )
    return Table(head, rows)
