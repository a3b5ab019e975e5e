"""Workers that share a queue, and are killed or stopped, as their server is: what is lost?

The same is done with scrapy-redis.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from statistics import mean

from benchmarks.shared.report import Check, Section, Table, all_of, at_most
from benchmarks.shared.scrapy_redis import SCRAPY_REDIS, settings_of
from tests.support.example_crawls import CONCURRENT_REQUESTS, PART
from tests.support.sites import PYTHON_DOC
from tests.support.worker_faults import (
    DOC,
    ENOUGH,
    EXAMPLE,
    GROWS,
    KINDS,
    LEASE_SECS,
    OURS,
    WORKERS,
    Case,
    Kind,
    Outcome,
    outcomes,
)

KILLS, FAULTS = 15, 5  # crawls of each kind
PEER_KILLS, PEER_FAULTS = 4, 2
# Without a request, after which workers that have not ended are killed.
QUIET_SECS, PEER_QUIET_SECS = 90.0, 10.0


def run(quick: bool) -> Section:  # noqa: FBT001 - every benchmark is called like this
    """Ours."""
    found = outcomes(_cases(OURS, KINDS, quick=quick), QUIET_SECS, quick=quick)
    kills = [entry for entry in found if entry.case.kind.is_kill]
    return Section(
        title="Workers that are killed",
        method=_method(kills, OURS),
        checks=[
            all_of(
                "crawls with a kill at random in which every page is crawled, with its item",
                sum(kill.is_complete for kill in kills),
                len(kills),
            ),
            all_of(
                "of these, in which all workers end by themselves",
                sum(kill.has_ended for kill in kills),
                len(kills),
            ),
            at_most(
                "pages crawled twice for each killed worker, the most",
                max(kill.twice / kill.killed for kill in kills if kill.killed),
                CONCURRENT_REQUESTS,
            ),
            *_checks_of_faults([entry for entry in found if not entry.case.kind.is_kill]),
        ],
        tables=_tables(found),
        notes=_notes(found),
    )


def run_peer(quick: bool) -> Section:  # noqa: FBT001 - every benchmark is called like this
    """Scrapy-redis's."""
    kinds = [kind for kind in KINDS if kind.place != "cluster" and not kind.settings]
    quiet_secs = 2.0 if quick else PEER_QUIET_SECS
    found = outcomes(_cases(SCRAPY_REDIS, kinds, quick=quick), quiet_secs, quick=quick)
    return Section(
        title="Workers of scrapy-redis that are killed",
        method=_method([entry for entry in found if entry.case.kind.is_kill], SCRAPY_REDIS),
        tables=_tables(found),
        notes=f"{_notes(found)}\n"
        "Its connections wait for the server, as docs/scrapy-redis.md says.\n"
        "Its workers never end by themselves (its spiders wait for more): they are ended when "
        f"nothing has been asked for within {quiet_secs:.0f} seconds.\nIt does not support a "
        "Cluster.",
    )


def _cases(name: str, kinds: Iterable[Kind], *, quick: bool) -> Sequence[Case]:
    cases = []
    for kind in kinds:
        kills, faults = (KILLS, FAULTS) if name == OURS else (PEER_KILLS, PEER_FAULTS)
        number = 1 if quick else kills if kind.is_kill else faults
        for n in range(number):
            site = DOC if n % 5 == 4 and PYTHON_DOC.exists() else EXAMPLE
            grows, again = n % 2 == 0, n % 4 < 2 or kind.kills_all
            cases.append(Case(kind, name, site, grows, again, n, partial(settings_of, name)))
    return cases


def _checks_of_faults(found: Sequence[Outcome]) -> Sequence[Check]:
    what = "every page is crawled, all workers end, and there is no traceback"
    checks = []
    for name in dict.fromkeys(entry.case.kind.name for entry in found):
        these = [entry for entry in found if entry.case.kind.name == name]
        right = sum(e.is_complete and e.has_ended and not e.tracebacks for e in these)
        checks.append(all_of(f"{name}: {what}", right, len(these)))
    return checks


def _method(kills: Sequence[Outcome], name: str) -> str:
    lease = f", BLOOM_QUEUE_LEASE_SECS = {LEASE_SECS}" if name == OURS else ""
    scheduler = "CrashSafeScheduler with BLOOM_REDIS_URL" if name == OURS else name
    return (
        f"Crawls by {WORKERS} workers that share {scheduler} on one server (appendonly yes{lease}):"
        f" of {EXAMPLE} with {PART.sections} section, and, each fifth, of Python's documentation; "
        f"with BLOOM_EXPECTED_REQUESTS = {GROWS}, so that the filter grows several times, and with "
        f"{ENOUGH:,}. {len(kills)} crawls have a kill at a random instant: the number of requests "
        "answered so far is drawn. Workers that were killed are started again in half of the "
        "cases, a few seconds later; if all were killed, always. The server comes back within a "
        "second, with the same files. The site is served and the requests are counted by the "
        "benchmark. A replica takes over up to half a second after the last that it got. A page is "
        "crawled when it was asked for, its callback ran to the end, and its "
        "item passed the pipeline of a worker; the pages are those of a crawl with Scrapy's own "
        "scheduler and filter."
    )


def _tables(found: Sequence[Outcome]) -> Sequence[Table]:
    return [
        _table("in mid-crawl", found, lambda case: case.kind.name),
        _table("all of these, by site", found, _place),
    ]


def _place(case: Case) -> str:
    return f"{case.site}, {'the filter grows' if case.grows else 'one size'}"


def _table(head: str, found: Sequence[Outcome], name_of: Callable[[Case], str]) -> Table:
    rows = []
    for name in dict.fromkeys(name_of(entry.case) for entry in found):
        these = [entry for entry in found if name_of(entry.case) == name]
        per_killed = [entry.twice / entry.killed for entry in these if entry.killed]
        rows.append(
            (
                name,
                f"{len(these)}",
                f"{sum(entry.is_complete for entry in these)}",
                f"{max(len(entry.missing) for entry in these)}",
                f"{sum(entry.has_ended for entry in these)}",
                f"{max(entry.twice for entry in these)}",
                f"{mean(entry.twice for entry in these):.1f}",
                f"{max(per_killed):.1f}" if per_killed else "-",
            )
        )
    return Table(
        (
            *(head, "crawls", "every page", "missing, most", "ended"),
            *("crawled twice, most", "mean", "for a killed worker, most"),
        ),
        rows,
    )


def _notes(found: Sequence[Outcome]) -> str:
    return (
        f"CONCURRENT_REQUESTS is {CONCURRENT_REQUESTS}. What each worker asks for, robots.txt, is "
        "not counted as crawled twice.\n"
        "What a killed worker had done since its last batch, mostly for 0.03 s and a round trip, "
        "the server has not been told: that is crawled twice as well.\n"
        f"Items that came through a pipeline twice: {sum(entry.items_twice for entry in found):,}; "
        f"tracebacks in the logs: {sum(entry.tracebacks for entry in found):,}."
    )
