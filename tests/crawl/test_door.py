"""Known duplicates are dropped where callbacks yield them: same crawls as with Scrapy's filter."""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.support import door_crawls
from tests.support.crawls import ROOT, with_modules
from tests.support.sites import LIMIT

SCRIPT = Path(door_crawls.__file__)
# Everything goes the usual way, because somebody of the project would notice that it does not.
NOT_EARLY = {
    "extension ListensToScheduled",
    "extension ListensToDropped",
    "extension Ignores",
    "extension LateListener",
    "subclass of OffsiteMiddleware",
    "subclass of the scheduler",
    "subclass with request_seen",
}
AFTER_MIDDLEWARES = {
    "DUPEFILTER_DEBUG",
    "fingerprinter reads the Referer",
    "fingerprinter reads the meta",
    "middleware Rewrites",
    "middleware Counts",
    "middleware Drops",
    "middleware Doubles",
    "middleware Reorders",
    "middleware StopsEarly",
    "middleware SetsDontFilter",
    "subclass of DepthMiddleware",
    "other sites, after a middleware",
    "a crash-safe job, after a middleware",
}


@cache
def results(loop: str) -> dict:
    """Run all crawls in one process, which takes half a second for each two."""
    done = subprocess.run(
        [*with_modules(ROOT), sys.executable, str(SCRIPT), loop],
        stdout=subprocess.PIPE,
        timeout=8 * LIMIT,
        check=True,
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize("loop", ["asyncio", "select"])
@pytest.mark.xdist_group("door")
def test_the_same_crawl_as_with_scrapys_filter(loop: str) -> None:
    found = results(loop)
    assert found.keys() == door_crawls.VARIANTS.keys()
    for name, both in found.items():
        scrapy, bloom = both["scrapy"], both["bloom"]
        for key in ("pages", "stats", "lines", "seen_by_others"):
            assert bloom[key] == scrapy[key], (name, key)
        assert bloom["stats"]["finish_reason"] == (
            "enough" if name == "CloseSpider in mid-generator" else "finished"
        ), name
        place = "after" if name in AFTER_MIDDLEWARES else "before"
        if name.startswith("subclass") and name.endswith(("scheduler", "request_seen")):
            place = None
        assert bloom["place"] == place, name
        dropped = scrapy["asked"] - bloom["asked"]
        if name in NOT_EARLY:
            assert dropped == 0, name
        elif name not in {"returns None", "CloseSpider in mid-generator"}:  # nothing is known
            assert dropped > 0, name
