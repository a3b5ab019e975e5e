"""While Redis is away, the log says so at once; commands do not wait for it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import servers
from tests.support.cli import bloom
from tests.support.crawls import Crawl
from tests.support.sites import Site

PAGES = 150


@pytest.fixture
def server() -> Iterator[servers.Server]:
    server = servers.Server("valkey", "--requirepass", "geheim")
    yield server
    server.end()


def test_a_crawl_tells_of_each_outage(tree: Site, server: servers.Server, tmp_path: Path) -> None:
    server.kill()
    tree.hold_after(10)
    address = f"127.0.0.1:{server.port}/0"
    crawl = Crawl(
        tree.url,
        tmp_path,
        {
            "BLOOM_BACKEND": "redis",
            # More than a busy machine takes to answer: that would be one more outage.
            "BLOOM_REDIS_URL": f"redis://:geheim@{address}?socket_timeout=4",
        },
    )

    def counts() -> tuple[int, int]:
        return len(crawl.told("WARNING")), crawl.output.count("is back after")

    crawl.wait_until(lambda: counts() == (1, 0))
    assert f"redis://{address} does not answer: " in crawl.told("WARNING")[0]
    assert "up to 30 seconds (BLOOM_REDIS_DEADLINE_SECS)" in crawl.told("WARNING")[0]
    server.start()
    crawl.wait_until(lambda: counts() == (1, 1))
    crawl.wait_until(tree.is_holding)
    server.pause()
    tree.release()
    crawl.wait_until(lambda: counts() == (2, 1))
    server.go_on()
    assert crawl.finish() == 0
    assert counts() == (2, 2)
    assert len(tree.hits) == PAGES
    assert not crawl.told("ERROR")
    assert "geheim" not in crawl.output


@pytest.mark.parametrize("is_there", [False, True], ids=["refused", "silent"])
def test_a_command_does_not_wait_for_long(
    server: servers.Server, tmp_path: Path, is_there: bool
) -> None:
    url = f"redis://:geheim@127.0.0.1:{server.port}/0"
    (tmp_path / "urls").write_text("https://shop.example/\n")
    if is_there:
        server.pause()
    else:
        server.kill()
    for arguments in (["info", url], ["import", "urls", url]):
        ran = bloom(*arguments, "--key", "shop:bloom", cwd=tmp_path)
        assert "(waited up to 1.5 seconds, BLOOM_REDIS_DEADLINE_SECS)" in ran.error
        assert ran.err.count("\n") == 1
        assert "geheim" not in ran.err
    if is_there:
        server.go_on()
