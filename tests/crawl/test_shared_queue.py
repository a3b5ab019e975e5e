"""A crawl whose workers share a queue in Redis: start, end, pause, kills."""

from pathlib import Path

import pytest

from scrapy_bloom.queues.store import State
from tests.support import servers
from tests.support.crawls import LOOPS, Crawl, stat
from tests.support.shared_crawls import PAGES, SharedCrawl
from tests.support.sites import Site

CONCURRENT = 16
JUST_DONE = 32  # requests that a worker had finished, and not reported yet


def crawled_twice(site: Site) -> int:
    """The start page does not count: it has several addresses."""
    return sum(count - 1 for path, count in site.hits.items() if path != "/p/0")


def is_quiet(*workers: Crawl) -> bool:
    return not any(worker.our_lines("ERROR") + worker.our_lines("WARNING") for worker in workers)


def test_two_workers_and_a_late_one_crawl_each_page_once(wide: Site, tmp_path: Path) -> None:
    crawl = SharedCrawl(wide, tmp_path, CONCURRENT_REQUESTS=8)  # so that many are pending
    crawl.hold(20)
    servers.wait_for(lambda: crawl.count() > 10, lambda: f"few wait: {crawl.state()}")
    wide.hold_after(5)
    late = crawl.start()
    assert "Resuming crawl (" in late.output
    crawl.finish()
    assert len(wide.hits) == PAGES
    assert crawled_twice(wide) == 0
    assert crawl.starts() == 1
    assert is_quiet(*crawl.workers)
    for kind in ("enqueued", "dequeued"):
        counts = [stat(worker, f"scheduler/{kind}/redis") for worker in crawl.workers]
        assert sum(counts) == wide.total()
        assert counts == [stat(worker, f"scheduler/{kind}") for worker in crawl.workers]
    state = crawl.state()
    assert (state.total, state.done) == (0, wide.total())
    assert state.ended_at
    assert not state.workers


def test_a_pause_of_all_workers(wide: Site, tmp_path: Path) -> None:
    crawl = SharedCrawl(wide, tmp_path)
    for worker in crawl.hold(20):
        worker.begin_pause()
    crawl.finish(reason="shutdown")
    state = crawl.state()
    assert crawl.count() > 0
    assert (crawl.count(State.IN_FLIGHT), len(state.workers), state.ended_at) == (0, 0, 0)
    assert len(crawl.our_lines("is unfinished; pending requests")) == 1
    assert len(wide.hits) < PAGES
    crawl.finish(crawl.start())
    assert len(wide.hits) == PAGES
    assert crawled_twice(wide) == 0
    assert crawl.starts() == 1
    assert is_quiet(*crawl.workers)


@pytest.mark.parametrize("loop", [pytest.param({}, id="asyncio"), *LOOPS])
def test_all_workers_are_killed(loop: dict, wide: Site, tmp_path: Path) -> None:
    crawl = SharedCrawl(wide, tmp_path, **loop)
    for worker in crawl.hold(20):
        worker.kill()
    crawl.end_leases(*crawl.workers)
    wide.settle()
    worker = crawl.start()
    crawl.finish(worker)
    assert len(wide.hits) == PAGES
    assert crawled_twice(wide) <= 2 * (CONCURRENT + JUST_DONE)
    assert len(crawl.our_lines("has expired without a heartbeat")) == 2


# The spider's start().


@pytest.mark.parametrize("how", ["is killed", "is interrupted"])
def test_start_is_run_by_another_one_if_its_worker(how: str, wide: Site, tmp_path: Path) -> None:
    crawl = SharedCrawl(wide, tmp_path, first_time="await asyncio.sleep(1000)")
    first = crawl.start()
    servers.wait_for(lambda: wide.total() > 0, lambda: first.output)
    second = crawl.start()
    assert crawl.starts() == 1
    if how == "is killed":
        first.kill()
        crawl.end_leases(first)
    else:
        first.interrupt()
    crawl.finish(second)
    crawl.check_complete(starts=2)
    assert is_quiet(*crawl.workers)


def test_start_that_fails_is_through(wide: Site, tmp_path: Path) -> None:
    """As with Scrapy's scheduler: what it has yielded until then is crawled."""
    crawl = SharedCrawl(wide, tmp_path, first_time="raise RuntimeError('no more')")
    wide.hold_after(0)
    workers = [crawl.start() for _ in range(2)]
    servers.wait_for(lambda: crawl.state().is_started, lambda: workers[1].output)
    wide.release()
    assert [worker.finish() for worker in workers] == [0, 0]
    assert sum("RuntimeError: no more" in worker.output for worker in workers) == 1
    crawl.check_complete()


def test_a_middleware_that_collects_all_start_requests(wide: Site, tmp_path: Path) -> None:
    code = (
        "class Collect:\n"
        "    async def process_start(self, start):\n"
        "        for each in [each async for each in start]:\n"
        "            yield each\n"
        "LinkSpider.custom_settings = {'SPIDER_MIDDLEWARES': {Collect: 1}}\n"
    )
    crawl = SharedCrawl(wide, tmp_path, code=code)
    crawl.hold(20)
    crawl.finish()
    crawl.check_complete()
    assert crawled_twice(wide) == 0
    assert is_quiet(*crawl.workers)
