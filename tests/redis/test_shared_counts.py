"""The figures at the close of a crawl are those of the filter, whoever has recorded in it."""

import re
from pathlib import Path

from tests.support import servers
from tests.support.crawls import Crawl
from tests.support.sites import ScriptedSite, Site, tree_site


def figures(crawl: Crawl) -> tuple[int, int]:
    """Return what a crawl has recorded, and what it says is in the filter."""
    recorded, in_all = re.findall(
        r"filter closed: (\d+) requests? recorded, (\d+) in", crawl.output
    )[0]
    assert f"'bloom/count': {in_all}" in crawl.output
    assert f"'bloom/added': {recorded}" in crawl.output
    return int(recorded), int(in_all)


def test_workers_with_queues_of_their_own(
    tree: Site, server: servers.Server, tmp_path: Path
) -> None:
    settings = {
        "BLOOM_BACKEND": "redis",
        "BLOOM_REDIS_URL": server.url,
        "BLOOM_REDIS_KEY": "shared:bloom",
    }
    first = Crawl.held(tree, 5, tmp_path / "first", settings)
    other = tree_site(10)
    second = Crawl(other.url, tmp_path / "second", settings)
    assert second.finish() == 0
    tree.release()
    assert first.finish() == 0
    other.end()
    (a, in_all), (b, _) = map(figures, (first, second))
    assert in_all == a + b


def test_a_server_that_is_gone_at_the_close(server: servers.Server, tmp_path: Path) -> None:
    """The server has all recorded requests, so the crawl waits for nothing and logs nothing."""
    leaves = [f"/leaf/{number}" for number in range(5)]
    site = ScriptedSite({"/": [tuple(leaves)]})
    settings = {"BLOOM_BACKEND": "redis", "BLOOM_REDIS_URL": server.url}
    crawl = Crawl.held(site, 1, tmp_path, settings)
    crawl.wait_until(lambda: site.under_way == len(leaves))
    server.kill()
    site.release()
    assert crawl.finish() == 0
    site.end()
    assert figures(crawl) == (len(leaves), len(leaves))
    assert not crawl.our_lines("ERROR")
