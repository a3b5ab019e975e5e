"""Workers that share filter and queue in a server that is killed: is every page crawled?"""

import shutil
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean

from benchmarks.shared.report import Section, Table, all_of, at_most
from tests.support.server_losses import (
    FILTERS,
    NEIGHBOURS,
    OURS,
    SCRAPY_REDIS,
    WAYS,
    Outcome,
    Way,
    crawl,
    linked_site,
)

AT_ONCE = 4


def run(quick: bool) -> Section:  # noqa: FBT001 - every benchmark is called like this
    pages, workers, rounds = (200, 2, 1) if quick else (1500, 3, 4)
    cases = [(way, name, n) for n in range(rounds) for way in WAYS for name in FILTERS]
    directory = Path(tempfile.mkdtemp(prefix="restarts-"))
    with ThreadPoolExecutor(AT_ONCE) as pool:

        def outcome(case: tuple[Way, str, int]) -> Outcome:
            way, name, number = case
            return crawl(
                way,
                name,
                directory / f"{way.name}-{name}-{number}".replace(" ", "-"),
                site=linked_site(pages),
                workers=workers,
                seed=f"{way.name} {number}",
            )

        outcomes = list(pool.map(outcome, cases))
    ours = [each_outcome for each_outcome in outcomes if each_outcome.name == OURS]
    theirs = [each_outcome for each_outcome in outcomes if each_outcome.name == SCRAPY_REDIS]
    wrong = [
        each_outcome
        for each_outcome in outcomes
        if each_outcome.missing or not each_outcome.has_ended
    ]
    if not wrong:
        shutil.rmtree(directory)
    complete = [mine for mine, other in zip(ours, theirs, strict=True) if not other.missing]
    return Section(
        title="A server that loses something",
        method=(
            f"{workers} workers share scrapy-redis's queue and a filter on one server, as "
            f"docs/scrapy-redis.md says, and crawl a site of {pages:,} pages, each of which links "
            f"to two children, up to {2 * NEIGHBOURS} neighbours, and the home page. At a random "
            "instant, after 35 to 60 % of the pages, the server loses something. The same is done "
            "with scrapy-redis's own set in place of the filter, with the same instants. A page is "
            "crawled when the site has answered it."
        ),
        checks=[
            all_of(
                f"crawls with every page, of those where {SCRAPY_REDIS} leads to every page",
                sum(not entry.missing for entry in complete),
                len(complete),
            ),
            all_of(
                "crawls in which all workers end by themselves",
                sum(our.has_ended for our in ours),
                len(ours),
            ),
            at_most(
                "WARNINGs of one worker that the filter was lost, the most",
                max(len(lines) for our in ours for lines in our.warnings),
                1,
                "{:.0f}",
            ),
        ],
        tables=[_table(outcomes)],
        notes="".join(
            f"Not every page: {entry.name}, {entry.way}, after {entry.lost_at:,} pages: "
            f"{len(entry.missing):,} missing.\n"
            for entry in wrong
        )
        + "A page that was crawled before the loss is crawled again where the server has forgotten "
        "it: that is meant so, since what else it has forgotten is not known.",
    )


def _table(outcomes: Sequence[Outcome]) -> Table:
    rows = []
    for way in WAYS:
        for name in FILTERS:
            these = [
                outcome for outcome in outcomes if (outcome.way, outcome.name) == (way.name, name)
            ]
            rows.append(
                (
                    f"{way.name}: {name}",
                    f"{len(these)}",
                    f"{sum(not entry.missing for entry in these)}",
                    f"{max(len(entry.missing) for entry in these):,}",
                    f"{mean(entry.crawled for entry in these):,.0f}",
                )
            )
    return Table(("the server", "crawls", "every page", "missing, most", "answers, mean"), rows)
