"""`scrapy bloom stop`, and workers that wait for requests until then."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.support import servers
from tests.support.cli import bloom
from tests.support.crawls import Crawl
from tests.support.shared_crawls import PAGES, SharedCrawl
from tests.support.sites import Site

FIRST = "/p/0"  # which "/" and start() lead to as well
SAFE = {"SCHEDULER": "scrapy_bloom.CrashSafeScheduler"}


def fields(crawl: SharedCrawl, ending: bytes) -> dict[bytes, bytes]:
    workers = crawl.server.client.hgetall(crawl.keys["workers"])
    return {name: value for name, value in workers.items() if name.endswith(ending)}


def test_all_workers_end_and_the_crawl_is_resumed(wide: Site, tmp_path: Path) -> None:
    crawl = SharedCrawl(wide, tmp_path, CONCURRENT_REQUESTS=4)
    crawl.hold(20, 4)
    with ThreadPoolExecutor() as pool:
        stopping = pool.submit(bloom, "stop", *crawl.place, cwd=tmp_path)
        servers.wait_for(lambda: len(fields(crawl, b":stop")) == 4, lambda: "they are not asked")
        crawl.finish(reason="shutdown")
        ran = stopping.result(servers.LIMIT)
    assert ran.status == 0
    left = crawl.count()
    assert 0 < left < PAGES
    assert f"4 workers of {crawl.key} in " in ran.out
    assert f" ended; {left} pending" in ran.out
    assert len(crawl.our_lines("shuts down, because scrapy bloom stop was run")) == 4
    assert not crawl.state().workers
    assert not fields(crawl, b":stop")
    assert wide.total() < PAGES

    again = bloom("stop", *crawl.place, cwd=tmp_path)
    assert again.out.startswith(f"No crawl uses {crawl.key} in ")
    crawl.finish(crawl.start())  # nobody asks this one to end
    assert len(wide.hits) == PAGES
    assert [path for path, number in wide.hits.items() if number > 1] == [FIRST]


def test_killed_workers_are_waited_for_and_counted(wide: Site, tmp_path: Path) -> None:
    crawl = SharedCrawl(wide, tmp_path, BLOOM_QUEUE_LEASE_SECS=5)
    killed, other = crawl.hold(20)
    killed.kill()
    with ThreadPoolExecutor() as pool:
        stopping = pool.submit(bloom, "stop", *crawl.place, cwd=tmp_path)
        other.wait_until(lambda: "scrapy bloom stop was run" in other.output)
        crawl.finish(other, reason="shutdown")
        ran = stopping.result(servers.LIMIT)
    assert ran.status == 0
    assert f"2 workers of {crawl.key} in " in ran.out
    assert f":{killed.pid}" in ran.err
    assert "(a killed worker counts until its lease expires" in ran.err


def test_a_job_is_interrupted(tree: Site, tmp_path: Path) -> None:
    job = tmp_path / "job"
    crawl = Crawl.held(tree, 20, tmp_path, {**SAFE, "JOBDIR": job})
    with ThreadPoolExecutor() as pool:
        stopping = pool.submit(bloom, "stop", job, cwd=tmp_path)
        crawl.wait_until(lambda: "Received SIGINT" in crawl.output)
        tree.release()
        ran = stopping.result(servers.LIMIT)
    assert ran.out.startswith(f"1 worker of {job} ended; ")
    assert f":{crawl.pid} (" in ran.err
    assert crawl.finish() == 0
    assert "'finish_reason': 'shutdown'" in crawl.output
    ran = bloom("stop", job, cwd=tmp_path)
    assert ran.out.startswith(f"No crawl uses {job}; ")
    assert " pending" in ran.out


def test_workers_wait_for_requests_until_they_are_stopped(wide: Site, tmp_path: Path) -> None:
    crawl = SharedCrawl(wide, tmp_path, BLOOM_QUEUE_WHEN_EMPTY="wait")
    crawl.start(2)
    servers.wait_for(lambda: len(wide.hits) == PAGES, lambda: "not all pages are crawled")
    servers.wait_for(lambda: not crawl.state().total, lambda: f"{crawl.state()}")
    before = fields(crawl, b":number")

    def go_on() -> bool:
        now = fields(crawl, b":number")
        return all(int(now[name]) >= int(before[name]) + 4 for name in before)

    servers.wait_for(go_on, lambda: "they do not look for requests any more")
    crawl.start()  # one that finds nothing does so, too
    assert bloom("stop", *crawl.place, cwd=tmp_path).status == 0
    crawl.finish(reason="shutdown")
    assert not crawl.state().ended_at
    crawl.finish(crawl.start(BLOOM_QUEUE_WHEN_EMPTY="close"))
    assert crawl.state().ended_at
    late = crawl.start()
    assert bloom("stop", *crawl.place, cwd=tmp_path).status == 0  # of a crawl that is over, too
    crawl.finish(late, reason="shutdown")
    assert [path for path, number in wide.hits.items() if number > 1] == [FIRST]
