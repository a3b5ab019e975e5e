"""Settings as people write them, such as 8k requests or 7d, in repeated crawls."""

import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest

from scrapy_bloom.copying.transfer import upload
from scrapy_bloom.redis.connection.server import RedisServer
from tests.support import servers
from tests.support.crawls import Crawl
from tests.support.sites import Site
from tests.support.workspace import fingerprints, make_filter, urls

DAY = 86_400
SETTINGS = {
    "BLOOM_EXPECTED_REQUESTS": "8k",
    "BLOOM_ERROR_RATE": "1e-4",
    "BLOOM_WINDOW_SECS": "7d",
    "BLOOM_ON_FULL": "warn",
    "BLOOM_SYNC_SECS": "0.5m",
}


@pytest.mark.parametrize("backend", ["files", "redis"])
def test_a_filter_with_six_parts_is_what_was_asked_for(
    backend: str, tree: Site, tmp_path: Path
) -> None:
    """The sum of six sixths of 1e-4 is a little more than that, as floats go."""
    quarter = 7 * DAY // 4
    newest = int(time.time()) - 3600
    clock = Clock([newest - before * quarter for before in reversed(range(6))])
    make_filter(
        tmp_path / "filter",
        clock.each(fingerprints(urls(range(6)))),
        capacity=8000,
        error_rate=1e-4,
        on_full="warn",
        window_secs=7 * DAY,
        clock=clock,
        spider="links",
    )
    assert len(list(tmp_path.glob("filter/*.bloom"))) == 6
    place = {"BLOOM_DIR": "filter"}
    if backend == "redis":
        url, key = servers.shared("valkey").url, f"{tmp_path.name}:bloom"
        upload(tmp_path / "filter", RedisServer(url), key)
        place = {"BLOOM_BACKEND": "redis", "BLOOM_REDIS_URL": url, "BLOOM_REDIS_KEY": key}
        place["BLOOM_REDIS_DEADLINE_SECS"] = "20s"
    crawl = Crawl.finished(tree.url, tmp_path, {**SETTINGS, **place})
    assert len(tree.hits) == 150
    assert "an error rate of" not in crawl.output
    assert not crawl.our_lines("WARNING")


class Clock:
    """The time at which each of some fingerprints is recorded."""

    def __init__(self, times: Sequence[float]) -> None:
        self.times = times
        self.now = times[0]

    def __call__(self) -> float:
        return self.now

    def each(self, fingerprints: Iterable[bytes]) -> Iterator[bytes]:
        for fingerprint, now in zip(fingerprints, self.times, strict=True):
            self.now = now
            yield fingerprint
