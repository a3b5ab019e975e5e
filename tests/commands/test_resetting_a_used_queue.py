"""`scrapy bloom reset` of a queue that workers use: refused, or done with --force as it says."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cli import Ran, bloom
from tests.support.shared_crawls import PAGES, SharedCrawl, wide_site


@pytest.fixture
def crawl(tmp_path: Path) -> Iterator[SharedCrawl]:
    site = wide_site()
    crawl = SharedCrawl(site, tmp_path)
    crawl.hold(20)
    yield crawl
    site.end()


def reset(crawl: SharedCrawl, *options: str) -> Ran:
    return bloom("reset", crawl.server.url, "--key", crawl.key, *options, cwd=crawl.directory)


def names(crawl: SharedCrawl) -> list[str]:
    return [each.name for each in crawl.state().workers]


@pytest.mark.parametrize("options", [("--queue",), ()], ids=["the queue", "the filter, too"])
def test_it_is_refused_while_workers_use_it(options: tuple[str, ...], crawl: SharedCrawl) -> None:
    error = reset(crawl, *options, "--yes").error
    assert "2 workers use" in error
    assert all(name in error for name in names(crawl))
    assert "--force" in error
    assert "nothing was deleted" in error
    crawl.finish()
    assert len(crawl.site.hits) == PAGES
    assert reset(crawl, *options, "--yes").status == 0


def test_force_deletes_the_queue_and_says_what_workers_do(crawl: SharedCrawl) -> None:
    workers = names(crawl)
    question = reset(crawl, "--queue", "--force").error
    assert "nobody can be asked here" in question.lower()
    assert all(name in question for name in workers)
    assert re.search(r"with \d+ requests", question)
    assert "with the filter as it is" in question
    assert reset(crawl, "--queue", "--force", "--yes").status == 0
    crawl.finish()  # as the question says
    assert len(crawl.site.hits) < PAGES


def test_force_deletes_the_filter_too_and_says_that_workers_start_over(crawl: SharedCrawl) -> None:
    question = reset(crawl, "--force").error
    assert all(name in question for name in names(crawl))
    assert "over, with an empty filter" in question
    assert reset(crawl, "--force", "--yes").status == 0
    crawl.finish()
    assert len(crawl.site.hits) == PAGES
