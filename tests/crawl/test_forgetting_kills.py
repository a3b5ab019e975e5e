"""The next run crawls failed requests after a kill at any point, with every kind of queue."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from scrapy_bloom.job.jobdir import DATABASE
from scrapy_bloom.queues.job_state import read_counts, read_recent
from tests.support import servers
from tests.support.cli import bloom
from tests.support.crawls import FAILING_SPIDER, Crawl, spider_with
from tests.support.sites import ScriptedSite

PAGES = [f"/{number}" for number in range(40)]
FAILING = PAGES[::2]
CONCURRENT = 4
# As many answers may be with the spider as are downloaded meanwhile: no download begins then.
IN_FLIGHT = 2 * CONCURRENT
SAFE = "scrapy_bloom.CrashSafeScheduler"


@pytest.fixture
def site() -> Iterator[ScriptedSite]:
    """A page with links to all others, of which each second one fails."""
    answers: dict[str, list] = {"/": [tuple(PAGES)]}
    answers |= {page: [500] for page in FAILING}
    with ScriptedSite(answers) as site:
        yield site


@pytest.fixture(params=["files", "redis", "safe", "crawled"])
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, object]:
    places: dict[str, dict[str, object]] = {
        "files": {"BLOOM_DIR": tmp_path / "filter"},
        "redis": {
            "BLOOM_REDIS_URL": servers.shared("valkey").url,
            "BLOOM_REDIS_KEY": f"{tmp_path.name}-{time.time_ns()}",
        },
        "safe": {"JOBDIR": tmp_path / "job", "SCHEDULER": SAFE},
        "crawled": {"BLOOM_DIR": tmp_path / "filter", "BLOOM_RECORD_ON": "crawled"},
    }
    return {
        "BLOOM_FORGET_FAILED": request.param != "crawled",
        **places[request.param],
        "RETRY_ENABLED": False,
        "ROBOTSTXT_OBEY": False,
        "CONCURRENT_REQUESTS": CONCURRENT,
        "SCRAPER_SLOT_MAX_ACTIVE_SIZE": 1,
    }


def finished(site: ScriptedSite, directory: Path, settings: dict[str, object]) -> dict[str, int]:
    """The pages that a run crawls which ends well, but the first one."""
    site.forget()
    run = Crawl.finished(site.url, directory, settings, spider=FAILING_SPIDER)
    assert not run.our_lines("ERROR"), run.output
    return {path: count for path, count in site.hits.items() if path != "/"}


def forgotten(settings: dict[str, object], directory: Path) -> int:
    place = settings.get("BLOOM_DIR") or settings.get("JOBDIR")
    where = (place,) if place else (settings["BLOOM_REDIS_URL"], "--key")
    key = () if place else (settings["BLOOM_REDIS_KEY"],)
    return bloom("info", *map(str, where + key), "--json", cwd=directory).json["forgotten"]


def killed(
    site: ScriptedSite, number: int, directory: Path, settings: dict[str, object]
) -> set[str]:
    """Kill a run once so many pages have been answered; the pages that it asked for."""
    Crawl.held(site, number, directory, settings, spider=FAILING_SPIDER).kill()
    return set(site.hits) - {"/"}


def leaves_nothing(settings: dict[str, object]) -> bool:
    """Return whether the next run crawls what a killed run had queued."""
    return "JOBDIR" in settings or "BLOOM_RECORD_ON" in settings


def test_a_kill_while_pages_are_crawled_again(
    site: ScriptedSite, settings: dict[str, object], tmp_path: Path
) -> None:
    first = finished(site, tmp_path, settings)
    assert set(first) == set(PAGES)
    is_forgotten = settings["BLOOM_FORGET_FAILED"]
    assert forgotten(settings, tmp_path) == (len(FAILING) if is_forgotten else 0)
    site.answers = {"/": [tuple(PAGES)]}  # the site is repaired
    site.hits.clear()
    asked = killed(site, 10, tmp_path, settings)
    assert 5 < len(asked) < len(FAILING)
    last = finished(site, tmp_path, settings)
    assert set(last) | asked <= set(FAILING)
    if leaves_nothing(settings):  # elsewhere, what was queued died with its process
        assert set(last) | asked == set(FAILING)
    assert len(set(last) & asked) <= IN_FLIGHT
    assert set(last.values()) <= {1}
    assert finished(site, tmp_path, settings) == {}
    assert forgotten(settings, tmp_path) == 0


def test_a_kill_while_pages_fail(
    site: ScriptedSite, settings: dict[str, object], tmp_path: Path
) -> None:
    site.answers |= {page: [500] for page in PAGES}
    asked = killed(site, 20, tmp_path, settings)
    site.answers = {"/": [tuple(PAGES)]}
    second = finished(site, tmp_path, settings)
    # Those that have failed; and what was queued, where the queue survives or is not recorded.
    wanted = set(PAGES) if leaves_nothing(settings) else asked
    assert set(second) <= wanted
    assert len(wanted - set(second)) <= (0 if leaves_nothing(settings) else IN_FLIGHT)
    assert set(second.values()) == {1}
    assert finished(site, tmp_path, settings) == {}


@pytest.mark.parametrize("when", ["before", "after"])
def test_the_queue_gives_a_request_up_when_it_is_forgotten(when: str, tmp_path: Path) -> None:
    """Both in one step: killed before or after it, the next run finds one or the other."""
    site = ScriptedSite({"/": [("/dead",)], "/dead": [500]})
    spy = tmp_path / "spy.py"
    spy.write_text(
        "import contextlib, os\n"
        "from scrapy_bloom import CrashSafeScheduler\n"
        "from scrapy_bloom.queues.sqlite import RequestDatabase\n"
        "stored = RequestDatabase._stored\n"
        "@contextlib.contextmanager\n"
        "def dying(self, batch):\n"
        "    forgets = any(change.forgets for change in batch.changes)\n"
        f"    if forgets and {when == 'before'}: os.kill(os.getpid(), 9)\n"
        "    with stored(self, batch): yield\n"
        "    if forgets: os.kill(os.getpid(), 9)\n"
        "RequestDatabase._stored = dying\n"
    )
    options = {"JOBDIR": "job", "BLOOM_FORGET_FAILED": True, "RETRY_ENABLED": False}
    options |= {"ROBOTSTXT_OBEY": False}
    run = Crawl(
        site.url,
        tmp_path,
        {**options, "SCHEDULER": "spy.CrashSafeScheduler"},
        spider=FAILING_SPIDER,
        prefix=("env", f"PYTHONPATH={tmp_path}"),
    )
    assert run.finish() != 0
    assert read_counts(tmp_path / "job" / DATABASE) == (0, when == "before")
    changes = read_recent(tmp_path / "job" / DATABASE)
    assert sum(bool(change.forgets) for change in changes) == (when == "after")
    site.answers["/dead"] = [()]
    run = Crawl.finished(site.url, tmp_path, {**options, "SCHEDULER": SAFE}, spider=FAILING_SPIDER)
    assert site.hits["/dead"] == 2
    site.end()


def test_requests_redirected_to_a_pending_page_are_forgotten_at_a_pause(tmp_path: Path) -> None:
    """That page may fail in the next run, which does not know what was redirected to it."""
    site = ScriptedSite({"/": [("/first", "/moved", "/held", "/waits")], "/moved": ["/waits"]})
    options = {"JOBDIR": "job", "SCHEDULER": SAFE, "BLOOM_FORGET_FAILED": True}
    options |= {"RETRY_ENABLED": False, "ROBOTSTXT_OBEY": False, "CONCURRENT_REQUESTS": 1}
    # The oldest first.
    options |= {"SCHEDULER_DISK_QUEUE": "scrapy.squeues.PickleFifoDiskQueue"}
    run = Crawl.held(site, 3, tmp_path, options, spider=FAILING_SPIDER)
    assert run.interrupt() == 0, run.output
    assert dict(site.hits) == {"/": 1, "/first": 1, "/moved": 1, "/held": 1}
    assert forgotten({"JOBDIR": tmp_path / "job"}, tmp_path) == 1
    site.answers["/waits"] = [500]
    second = finished(site, tmp_path, options)
    assert second["/moved"] == 1
    site.end()


def test_a_failed_request_that_cannot_be_serialized_is_forgotten(tmp_path: Path) -> None:
    site = ScriptedSite({"/": [("/dead",)], "/dead": [500]})
    spider = spider_with(
        tmp_path,
        "def parse(self, response):\n"
        "    for link in response.css('a::attr(href)').getall():\n"
        "        yield response.follow(link, lambda response: None)\n"
        "LinkSpider.parse = parse\n",
    )
    options = {"JOBDIR": "job", "SCHEDULER": SAFE, "BLOOM_FORGET_FAILED": True}
    options["RETRY_ENABLED"] = False
    for times in (1, 2):
        Crawl.finished(site.url, tmp_path, options, spider=spider)
        assert site.hits["/dead"] == times
    site.end()
