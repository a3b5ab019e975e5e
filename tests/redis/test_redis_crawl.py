"""Real crawls whose filter is in Redis: two workers, scrapy-redis, outages."""

from pathlib import Path
from typing import Any

from tests.support import servers
from tests.support.crawls import SCRAPY_REDIS, SHARED_SPIDER, Crawl
from tests.support.sites import ScriptedSite, Site

PAGES = 60


ALONE = {"IDLE_SECS": 0}  # nobody else finds what is to be waited for


def shared(url: str, work_dir: Path, **settings: Any) -> Crawl:
    return Crawl(url, work_dir, {**SCRAPY_REDIS, **settings}, spider=SHARED_SPIDER)


def test_what_scrapy_redis_keeps_and_flushes(
    tree: Site, server: servers.Server, tmp_path: Path
) -> None:
    def pages(**settings: Any) -> int:
        tree.forget()
        crawl = shared(tree.url, tmp_path, REDIS_URL=server.url, **ALONE, **settings)
        assert crawl.finish() == 0, crawl.output
        assert "'finish_reason': 'finished'" in crawl.output
        return len(tree.hits)

    assert pages() == PAGES
    assert pages() == 0  # SCHEDULER_PERSIST: the filter is still there
    assert pages(SCHEDULER_FLUSH_ON_START=True) == PAGES
    assert server.client.keys("shared:*")
    assert pages(SCHEDULER_PERSIST=False) == 0
    assert not server.client.keys("*")  # flushed at the close
    assert pages(SCHEDULER_PERSIST=False) == PAGES
    assert not server.client.keys("*")


def test_a_worker_that_flushes_costs_the_others_no_page(
    server: servers.Server, tmp_path: Path
) -> None:
    """It empties filter and queue, so requests queued in between must be new again."""
    pages = [f"/p/{number}" for number in range(50)]
    site = ScriptedSite({path: [tuple(pages)] for path in ("/", *pages)})
    settings = {
        "REDIS_URL": server.url,
        "SCHEDULER_PERSIST": False,
        "DOWNLOAD_DELAY": 0.05,
        "CONCURRENT_REQUESTS": 2,
    }
    site.hold_after(10)  # each takes part: neither may have crawled all before the other starts
    stays = shared(site.url, tmp_path / "stays", **settings)
    stays.wait_until(site.is_holding)
    other = shared(site.url, tmp_path / "other", **settings, CLOSESPIDER_PAGECOUNT=10)
    other.wait_until(lambda: "Bloom filter in " in other.output)
    site.release()
    for worker in (stays, other):
        assert worker.finish() == 0, worker.output
        assert not worker.our_lines("ERROR")
    assert set(site.hits) == {"/", *pages}
    (warning,) = stays.our_lines("WARNING")
    assert "was lost: removed, flushed" in warning
    assert not other.our_lines("WARNING")
    site.end()


def test_scrapy_redis_with_another_fingerprinter(
    tree: Site, server: servers.Server, tmp_path: Path
) -> None:
    """One that looks at the number in /p/NUMBER only, and only at its last digit."""
    crawl = shared(
        tree.url,
        tmp_path,
        REDIS_URL=server.url,
        REQUEST_FINGERPRINTER_CLASS="tests.support.components.LastDigit",
        **ALONE,
    )
    assert crawl.finish() == 0, crawl.output
    assert 2 < len(tree.hits) <= 11
    assert len({page[-1] for page in tree.hits}) >= len(tree.hits) - 1
    crawl = shared(tree.url, tmp_path, REDIS_URL=server.url)
    assert crawl.finish() != 0
    assert "REQUEST_FINGERPRINTER_CLASS" in crawl.our_lines("ERROR")[0]


def test_scrapy_redis_settings_name_the_server(
    tree: Site, server: servers.Server, tmp_path: Path
) -> None:
    server.client.config_set("requirepass", "geheim")
    crawl = shared(
        tree.url,
        tmp_path,
        REDIS_HOST="127.0.0.1",
        REDIS_PORT=server.port,
        REDIS_PARAMS='{"password": "geheim", "db": 3}',
        LOG_LEVEL="DEBUG",
        **ALONE,
    )
    assert crawl.finish() == 0, crawl.output
    assert len(tree.hits) == PAGES
    assert "geheim" not in crawl.output.replace("REDIS_PARAMS", "")
    assert "Known duplicates are dropped" not in crawl.output  # its scheduler asks about each


def test_a_server_that_is_gone_at_the_close(server: servers.Server, tmp_path: Path) -> None:
    """The server has all recorded requests, so the crawl waits for nothing and logs nothing."""
    leaves = [f"/leaf/{number}" for number in range(5)]
    site = ScriptedSite({"/": [tuple(leaves)]})
    settings = {"BLOOM_REDIS_URL": server.url}
    crawl = Crawl.held(site, 1, tmp_path, settings)
    crawl.wait_until(lambda: site.under_way == len(leaves))
    server.kill()
    site.release()
    assert crawl.finish() == 0
    site.end()
    assert "filter closed: 5 new, 5 in all" in crawl.output
    assert "'bloom/count': 5" in crawl.output
    assert not crawl.our_lines("ERROR")
