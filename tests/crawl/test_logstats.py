"""The filter's line in the log, in real crawls: when it comes, and what it says."""

import re
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.crawls import LOOPS, Crawl
from tests.support.sites import Site

PAGES = 120
OFTEN = {"LOGSTATS_INTERVAL": 0.2}
LINE = re.compile(
    r"Bloom filter: ([\d,]+) new \(([+-][\d,]+)\), "
    r"([\d,]+) duplicates? \(([+-][\d,]+)\), ([\d,]+) recorded in all$",
    re.MULTILINE,
)
SCRAPYS = "[scrapy.extensions.logstats] INFO: Crawled "


def figures(output: str) -> list[list[int]]:
    """Return the figures of each line, in their order there."""
    return [[int(word.replace(",", "")) for word in words] for words in LINE.findall(output)]


def checked(output: str) -> list[list[int]]:
    """Return the same; each line continues the line before, and reports something new."""
    lines = figures(output)
    assert len(lines) == output.count("Bloom filter: "), output
    for before, (new, more_new, filtered, more_filtered, _) in pairwise([[0] * 5, *lines]):
        assert (more_new, more_filtered) == (new - before[0], filtered - before[2])
        assert more_new or more_filtered
    return lines


@pytest.fixture
def site(tree: Site) -> Site:
    tree.delay = 0.1
    return tree


def _wait_for_lines(crawl: Crawl, number: int) -> None:
    crawl.wait_until(lambda: len(figures(crawl.output)) >= number)


@pytest.mark.parametrize("loop", [pytest.param({}, id="asyncio"), *LOOPS])
def test_a_line_whenever_there_is_something_new(loop: dict, site: Site, tmp_path: Path) -> None:
    crawl = Crawl.held(site, 25, tmp_path, {**OFTEN, **loop})
    _wait_for_lines(crawl, 1)
    site.hold_after(25)
    _wait_for_lines(crawl, 2)
    # Nothing is answered for some intervals.
    crawl.wait_until(lambda: re.split(LINE, crawl.output)[-1].count("(at 0 pages/min)") >= 3)
    site.hold_after(25)
    _wait_for_lines(crawl, 3)
    site.release()
    assert crawl.finish() == 0, crawl.output
    assert not crawl.lines("ERROR") + crawl.our_lines("WARNING")
    lines = checked(crawl.output)
    assert all(in_all == new for new, _, _, _, in_all in lines)
    assert lines[-1][0] > lines[1][0]  # also after the pause
    assert lines[-1][2] > lines[1][2]
    assert len(lines) < crawl.output.count(SCRAPYS)


def test_no_line_without_an_interval(site: Site, tmp_path: Path) -> None:
    site.delay = 0.02
    crawl = Crawl.finished(site.url, tmp_path, {"LOGSTATS_INTERVAL": 0})
    assert len(site.hits) == PAGES
    assert "Bloom filter closed: " in crawl.output
    assert "Bloom filter: " not in crawl.output
    assert SCRAPYS not in crawl.output
    assert not crawl.lines("ERROR")


FAILING_STATS = """
from scrapy.statscollectors import MemoryStatsCollector


class FailingStats(MemoryStatsCollector):
    def set_value(self, key, value, *args, **kwargs):
        if key == "bloom/added" and 0 < value < 40:
            raise OSError("no room")
        super().set_value(key, value, *args, **kwargs)
"""


def test_after_a_failure_it_goes_on(site: Site, tmp_path: Path) -> None:
    (tmp_path / "failing_stats.py").write_text(FAILING_STATS)
    settings = {**OFTEN, "STATS_CLASS": "failing_stats.FailingStats"}
    crawl = Crawl.held(site, 80, tmp_path, settings)
    crawl.wait_until(lambda: bool(figures(crawl.output)))
    assert crawl.interrupt() == 0
    (error,) = crawl.lines("ERROR")
    assert "The Bloom filter failed on its figures: the log lacks them" in error
    assert "OSError: no room" in crawl.output
    assert checked(crawl.output)[0][0] >= 40
