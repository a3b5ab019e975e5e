"""`scrapy bloom reset`: it asks, and leaves nothing of a filter in files or in Redis."""

import time
from pathlib import Path

from scrapy_bloom.redis.connection.server import RedisServer
from tests.support import servers
from tests.support.backends import redis_backend
from tests.support.cli import at_a_terminal, bloom
from tests.support.crawls import Crawl
from tests.support.sites import Site
from tests.support.workspace import (
    FINGERPRINTER,
    contents,
    fingerprints,
    make_filter,
    shared_filter,
    urls,
)


def test_reset_asks(tmp_path: Path) -> None:
    make_filter(tmp_path / "job/bloom", fingerprints(urls(range(300))), capacity=100)
    (tmp_path / "job/requests.queue").mkdir()
    (tmp_path / "job/requests.queue/active.json").write_text("[]")
    before = contents(tmp_path)
    nobody = bloom("reset", "job", cwd=tmp_path)
    assert "add --yes" in nobody.error
    no = at_a_terminal("reset", "job", cwd=tmp_path, answer=b"n\n")
    assert no.status == 1
    assert "nothing was deleted" in no.out
    after = contents(tmp_path)
    lock = "job/bloom/lock"  # an older filelock sets its time
    assert {**after, lock: ()} == {**before, lock: ()}
    yes = at_a_terminal("reset", "job", cwd=tmp_path, answer=b"y\n")
    assert yes.status == 0, yes
    assert "Deleted 2 files" in yes.out
    assert set(before) - set(contents(tmp_path)) == {
        "job/bloom/generation-0001.bloom",
        "job/bloom/generation-0002.bloom",
    }
    assert "job holds no filter" in bloom("reset", "job", "--yes", cwd=tmp_path).error


def test_reset_refuses_while_a_crawl_runs(tree: Site, tmp_path: Path) -> None:
    crawl = Crawl.held(tree, 20, tmp_path, {"JOBDIR": "job"})
    assert (
        "is in use by another running crawl" in bloom("reset", "job", "--yes", cwd=tmp_path).error
    )
    tree.release()
    assert crawl.finish() == 0
    assert len(tree.hits) == 150
    assert bloom("reset", "job", "--yes", cwd=tmp_path).status == 0
    tree.hits.clear()
    assert Crawl(tree.url, tmp_path, {"JOBDIR": "job"}).finish() == 0
    assert len(tree.hits) == 150


def test_reset_in_redis(server: servers.Server, tmp_path: Path) -> None:
    key, recorded = f"{tmp_path.name}:bloom", fingerprints(urls(range(10)))
    shared_filter(server, key, recorded)
    crawler = redis_backend(
        RedisServer(server.url), key, capacity=1000, error_rate=1e-6, fingerprinter=FINGERPRINTER
    )
    crawler.open()
    crawler.begin()
    assert not crawler.add(recorded[0])
    assert bloom("reset", server.url, "--key", key, cwd=tmp_path).status == 1
    assert bloom("reset", server.url, "--key", key, "--yes", cwd=tmp_path).status == 0
    assert not server.client.keys(f"*{key}*")
    time.sleep(1)  # for so long a mirror is trusted
    assert [crawler.add(each) for each in recorded] == [True] * 10
    crawler.close()
    other = redis_backend(
        RedisServer(server.url), key, capacity=1000, error_rate=1e-6, fingerprinter=FINGERPRINTER
    )
    other.open()
    assert [each in other for each in recorded] == [True] * 10
    other.close()
    error = bloom("reset", server.url, "--key", "nothing", "--yes", cwd=tmp_path).error
    assert "has no filter" in error
