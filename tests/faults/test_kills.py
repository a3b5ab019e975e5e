"""Crawls that are killed at random instants; a failure prints the seed and the instants."""

import random
import secrets
import time
from pathlib import Path

import pytest

from scrapy_bloom.job.jobdir import FILE
from tests.support.cli import bloom
from tests.support.crawls import Crawl
from tests.support.request_queues import counts_in
from tests.support.sites import tree_site

PAGES = 120
SOAK = pytest.mark.soak
KILLS = 3  # as many as a page may be in flight at, and not be set aside

SAFE = {
    "SCHEDULER": "scrapy_bloom.CrashSafeScheduler",
    "JOBDIR": "job",
    "BLOOM_EXPECTED_REQUESTS": 30,
}


@pytest.mark.parametrize("job", [0, *(pytest.param(n, marks=SOAK) for n in range(1, 8))])
@pytest.mark.parametrize("queue", ["ScrapyPriorityQueue", "DownloaderAwarePriorityQueue"])
def test_every_page_is_crawled_after_kills_at_random_instants(
    queue: str, job: int, tmp_path: Path
) -> None:
    """The job resumes without a warning, and only what was in flight is crawled twice."""
    seed = secrets.randbelow(10**6)
    rng = random.Random(seed)
    settings = {**SAFE, "SCHEDULER_PRIORITY_QUEUE": f"scrapy.pqueues.{queue}"}
    site = tree_site(PAGES)
    killed, again = [], 0
    for number in range(KILLS):
        site.delay = 0.1
        site.hold_after(25)  # it must not be done before it is killed
        before = site.total()
        crawl = Crawl(site.url, tmp_path, settings)
        # Either while it is opened, or somewhere in between; never when all is done.
        hits = rng.choice([0, rng.randrange(1, 20)]) if number else 15
        moment = rng.uniform(0, 0.3 if hits == 0 else 0.05)
        crawl.wait_until(
            lambda: (
                "Overridden settings" in crawl.output  # noqa: B023
                and site.total() >= before + hits  # noqa: B023
            )
        )
        time.sleep(moment)
        assert crawl.running(), f"seed {seed}: {crawl.output}"
        crawl.kill()
        site.settle()
        if (tmp_path / "job" / FILE).exists():
            again += counts_in(tmp_path / "job" / FILE)[1]
        killed.append((hits, round(moment, 3)))
    what = f"seed {seed}, killed after (hits, seconds more) {killed}"
    assert len(site.hits) < PAGES, what
    in_flight = bloom("info", "job", "--json", cwd=tmp_path).json["queue"]["in_flight"]
    assert in_flight == counts_in(tmp_path / "job" / FILE)[1], what
    site.delay = 0
    crawl = Crawl(site.url, tmp_path, settings)
    assert crawl.finish() == 0, f"{what}: {crawl.output}"
    assert "'finish_reason': 'finished'" in crawl.output, what
    assert set(site.hits) == {f"/p/{number}" for number in range(PAGES)}, what
    assert not crawl.lines("ERROR") + crawl.our_lines("WARNING"), f"{what}: {crawl.output}"
    assert "Queue and filter are complete: nothing is lost" in crawl.output, what
    assert counts_in(tmp_path / "job" / FILE) == (0, 0), what
    twice = sum(count - 1 for path, count in site.hits.items() if path != "/p/0")
    assert twice <= again, what
    site.end()
