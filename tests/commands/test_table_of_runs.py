"""The table of runs in `scrapy bloom info` and in the report."""

from pathlib import Path

import pytest

from tests.support.crawls import SPIDER
from tests.support.jobs import PLACES, Job
from tests.support.sites import ScriptedSite


@pytest.mark.parametrize("where", PLACES)
def test_each_run_has_its_own_figures(where: str, tmp_path: Path) -> None:
    pages = [f"/{number}" for number in range(5)]
    with ScriptedSite({"/": [(*pages, "/bad")], "/bad": [503]}) as site:
        job = Job(where, tmp_path, site, SPIDER)
        job.crawl("monday")
        job.crawl("tuesday")
        first, last = job.bloom("info", "--json").json["queue"]["runs"]
        text = job.bloom("info").out
        job.bloom("report", "-o", "page.html")
    assert [run["name"] for run in (first, last)] == ["monday", "tuesday"]
    assert first["began"] <= first["ended"] <= last["began"] <= last["ended"]
    figures = ("crawled", "new", "failed", "dead")
    assert [first[name] for name in figures] == [6, 7, 1, 0]
    assert [last[name] for name in figures] == [1, 1, 1, 0]  # the first page again
    rows = [line.split() for line in text.splitlines()[-2:]]
    assert [(row[0], row[-4:]) for row in rows] == [
        ("monday", ["6", "7", "1", "0"]),
        ("tuesday", ["1", "1", "1", "0"]),
    ]
    assert ">monday</td>" in (tmp_path / "page.html").read_text("utf-8")
