"""Pages that failed are crawled again: by a later link, and by the next run."""

import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from scrapy_bloom import StorageError
from scrapy_bloom.crawl.outcomes import ForgetFailed
from tests.support import servers
from tests.support.cli import bloom
from tests.support.crawls import FAILING_SPIDER, SHARED_SPIDER, SUPPORT, Crawl
from tests.support.sites import ScriptedSite

SHOP_SPIDER = SUPPORT / "shop_spider.py"
LISTS, ARTICLES = 4, 80
LIST_PAGES = {f"/s/{number}/" for number in range(LISTS)}
DETAILS = {f"/a/{number}" for number in range(ARTICLES)}
# Each in a way of its own: an error, a connection that is dropped, a callback that raises, a
# redirect to an error.
WAYS: list[Any] = [503, None, b"broken", "/gone"]
FAILING = {f"/a/{number}": WAYS[number % 4] for number in range(3, ARTICLES, 5)}
FORGET = {"BLOOM_FORGET_FAILED": True}


class Shop(ScriptedSite):
    """List pages, and articles with links to others: each has several, in several forms."""

    def __init__(self) -> None:
        lists = tuple(f"{page}?page=1&amp;sort=date" for page in LIST_PAGES)
        super().__init__({"/": [lists], "/gone": [503]})
        for number in range(LISTS):
            articles = (f"/a/{article}" for article in range(number, ARTICLES, LISTS))
            self.answers[f"/s/{number}/"] = [(*lists, *articles)]
        for number in range(ARTICLES):
            near, far = (number + 1) % ARTICLES, (number * 7 + 3) % ARTICLES
            links = (f"/a/{near}?utm_source=mail", f"/a/{far}#top", f"/a/{far}#end", *lists)
            self.answers[f"/a/{number}"] = [links]

    def fail(self) -> None:
        """Let some of the articles fail, until it is mended."""
        self.works = {path: self.answers[path] for path in FAILING}
        self.answers |= {path: [answer] for path, answer in FAILING.items()}

    def mend(self) -> None:
        self.answers |= self.works
        self.forget()

    def count(self, paths: Iterable[str]) -> dict[str, int]:
        """How often each of the paths was asked for, of those that were at all."""
        return {path: self.hits[path] for path in paths if path in self.hits}


@pytest.fixture
def shop() -> Iterator[Shop]:
    site = Shop()
    yield site
    site.end()


def run(site: Shop, directory: Path, settings: dict[str, object]) -> Crawl:
    return Crawl.finished(site.url, directory, settings, spider=SHOP_SPIDER)


def place(name: str, directory: Path) -> dict[str, object]:
    """The settings of two runs that share a filter."""
    if name == "local":
        return {"BLOOM_DIR": directory / "filter"}
    if name == "job":
        return {"JOBDIR": directory / "job"}
    key = f"{directory.name}-{time.time_ns()}"
    settings = {"BLOOM_BACKEND": "redis", "BLOOM_REDIS_KEY": key}
    return {**settings, "BLOOM_REDIS_URL": servers.shared(name).url}


@pytest.mark.parametrize(
    ("where", "how"),
    [
        ("local", FORGET),
        ("local", {"BLOOM_RECORD_ON": "crawled"}),
        ("valkey", FORGET),
        ("job", {**FORGET, "SCHEDULER": "scrapy_bloom.CrashSafeScheduler"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "+".join(value),
)
def test_the_next_run_crawls_exactly_what_failed(
    where: str, how: dict[str, object], shop: Shop, tmp_path: Path
) -> None:
    settings = {**place(where, tmp_path), **how}
    shop.fail()
    first = run(shop, tmp_path, settings)
    assert shop.count(DETAILS - set(FAILING)) == dict.fromkeys(DETAILS - set(FAILING), 1)
    failures = shop.count(FAILING)
    assert set(failures) == set(FAILING)
    times = 4  # a retry by Scrapy, and of dropped connections by Twisted
    if "BLOOM_FORGET_FAILED" in how:
        times *= 3
    assert max(failures.values()) <= times
    shop.mend()
    second = run(shop, tmp_path, settings)
    assert shop.count(DETAILS) == dict.fromkeys(FAILING, 1)
    assert not [line for each in (first, second) for line in each.told("ERROR")]
    assert not [line for each in (first, second) for line in each.told("WARNING")]
    shop.forget()
    run(shop, tmp_path, settings)
    assert shop.count(DETAILS) == {}
    assert shop.count(LIST_PAGES) == dict.fromkeys(LIST_PAGES, 1)  # as ever


def test_a_run_that_was_killed_leaves_the_rest_to_the_next_one(shop: Shop, tmp_path: Path) -> None:
    settings = {"BLOOM_DIR": tmp_path / "filter", "BLOOM_RECORD_ON": "crawled"}
    shop.fail()
    first = Crawl.held(shop, 60, tmp_path, settings, spider=SHOP_SPIDER)
    done = tmp_path / "done.txt"
    fine = {"/", *LIST_PAGES, *DETAILS} - set(FAILING)
    first.wait_until(lambda: len(lines(done)) >= sum(shop.count(fine).values()))
    crawled = DETAILS & set(lines(done))
    urls = "".join(f"{shop.url}{path[1:]}\n" for path in crawled)

    def are_recorded() -> bool:
        ran = bloom("check", "filter", "-", "--json", cwd=tmp_path, stdin=urls)
        return bool(ran.json["new"] == 0)

    first.wait_until(are_recorded)  # it was, but for the last ones, which were just handled
    first.kill()
    assert 15 < len(crawled) < len(DETAILS) - 15
    shop.mend()
    second = run(shop, tmp_path, settings)
    assert shop.count(DETAILS) == dict.fromkeys(DETAILS - crawled, 1)
    (warning,) = second.told("WARNING")
    assert "The filter keeps the requests that were crawled" in warning


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def looping() -> Iterator[ScriptedSite]:
    """Ten pages in a row, each of which links to a dead one."""
    answers: dict[str, list] = {"/dead": [500], "/": [("/0", "/dead")]}
    answers |= {f"/{number}": [(f"/{number + 1}", "/dead")] for number in range(10)}
    site = ScriptedSite(answers)
    yield site
    site.end()


def test_a_dead_page_does_not_loop(looping: ScriptedSite, tmp_path: Path) -> None:
    settings = {**place("local", tmp_path), **FORGET, "RETRY_ENABLED": False}
    settings |= {"CONCURRENT_REQUESTS": 1, "ROBOTSTXT_OBEY": False}
    for times in (3, 1):  # in the second run, all else is known, and only the first page crawled
        looping.hits.clear()
        run = Crawl.finished(looping.url, tmp_path, settings, spider=FAILING_SPIDER)
        assert looping.hits["/dead"] == times
        assert f"'bloom/forgotten': {times}," in run.output
        assert not run.told("ERROR")


def test_forgetting_under_scrapy_rediss_scheduler(looping: ScriptedSite, tmp_path: Path) -> None:
    settings = {
        **place("valkey", tmp_path),
        **FORGET,
        "RETRY_ENABLED": False,
        "CONCURRENT_REQUESTS": 1,
        "REDIS_URL": servers.shared("valkey").url,
        "SCHEDULER_PERSIST": True,
        "SCHEDULER": "scrapy_redis.scheduler.Scheduler",
        "SCHEDULER_QUEUE_KEY": f"{tmp_path.name}:queue",
    }
    run = Crawl.finished(looping.url, tmp_path, settings, spider=SHARED_SPIDER)
    assert looping.hits["/dead"] == 3
    assert len(looping.hits) == 13  # every other page, once, and the last one's link
    assert "'bloom/forgotten': 3," in run.output


def test_what_failed_during_an_outage_is_forgotten_after_it(
    looping: ScriptedSite, tmp_path: Path
) -> None:
    server = servers.Server("valkey", "--appendonly", "yes")
    settings = {
        "BLOOM_BACKEND": "redis",
        # A server that is only slow is not away.
        "BLOOM_REDIS_URL": f"{server.url}?socket_timeout=10",
        **FORGET,
        "BLOOM_REDIS_DEADLINE_SECS": 1,
        "BLOOM_REDIS_ON_OUTAGE": "pass",
        "RETRY_ENABLED": False,
        "CONCURRENT_REQUESTS": 1,
    }
    looping.answers |= {"/": [tuple(f"/{number}" for number in range(10))]}
    looping.answers |= {f"/{number}": [()] for number in range(10)}
    looping.answers["/7"] = looping.answers["/8"] = [500]
    try:
        # The last link is crawled first: after robots.txt and two pages, those that fail.
        run = Crawl.held(looping, 3, tmp_path, settings, spider=FAILING_SPIDER)
        server.kill()
        looping.hold_after(3)  # it cannot end before the server is back
        run.wait_until(lambda: "/6" in looping.hits and looping.is_holding())
        assert {"/7", "/8"} <= set(looping.hits)
        server.start()
        looping.delay = 0.3  # it asks for the server once a second, so before its end
        looping.release()
        assert run.finish() == 0, run.output
        assert "'bloom/forgotten': 2," in run.output
        looping.delay = 0
        looping.hits.clear()
        run = Crawl.finished(looping.url, tmp_path, settings, spider=FAILING_SPIDER)
        assert {"/7", "/8"} <= set(looping.hits)
    finally:
        server.end()


class ForgottenSet:
    """Stands in for `Forgotten`: what is in it, and whether its server is out of reach."""

    def __init__(self) -> None:
        self.fingerprints: list[bytes] = []
        self.is_away = False

    def add(self, fingerprints: Sequence[bytes]) -> None:
        if self.is_away:
            raise StorageError
        self.fingerprints += fingerprints


def test_forgetting_while_the_filter_is_out_of_reach() -> None:
    """What could not be forgotten is tried again, and an error at the close counts the rest."""
    forgotten = ForgottenSet()
    forgetting = ForgetFailed(forgotten.add)
    forgotten.is_away = True
    with pytest.raises(StorageError):
        forgetting.failed([b"0", b"1"])
    with pytest.raises(StorageError):
        forgetting.failed([b"2"])
    forgetting.ended([b"3"])
    assert not forgotten.fingerprints
    forgotten.is_away = False
    forgetting.ended([b"4"])
    assert forgotten.fingerprints == [b"0", b"1", b"2"]
    forgotten.is_away = True
    with pytest.raises(StorageError):
        forgetting.failed([b"5"])
    with pytest.raises(StorageError, match="1 failed request could not be forgotten because"):
        forgetting.close(is_finished=True)


def test_what_was_redirected_to_a_page_shares_its_fate() -> None:
    forgotten = ForgottenSet()
    forgetting = ForgetFailed(forgotten.add)
    forgetting.redirected([b"a"], b"fails")
    forgetting.redirected([b"of a"], b"a")
    forgetting.redirected([b"b"], b"works")
    forgetting.ended([b"crawled long ago"])
    forgetting.redirected([b"c"], b"crawled long ago")
    forgetting.redirected([b"d"], b"queued")
    forgetting.failed([b"fails"])
    forgetting.ended([b"works"])
    forgetting.redirected([b"of b"], b"b")  # b has ended with what it was redirected to
    assert sorted(forgotten.fingerprints) == [b"a", b"fails", b"of a"]
    forgetting.close(is_finished=False)
    assert forgotten.fingerprints[3:] == [b"d"]  # nobody knows: rather twice than never
    forgetting.failed([b"fails"])
    forgetting.failed([b"fails"])
    assert forgetting.is_given_up(b"fails")
    assert not forgetting.is_given_up(b"a")
    forgetting.redirected([b"e"], b"fails")
    assert forgotten.fingerprints[-1] == b"e"


def test_forgetting_survives_a_pause(looping: ScriptedSite, tmp_path: Path) -> None:
    """What was redirected in the first run, and is in the queue of the second, fails there."""
    looping.answers["/moved"] = ["/dead"]
    looping.answers["/"] = [("/0", "/moved")]
    for number in range(10):
        looping.answers[f"/{number}"] = [(f"/{number + 1}",)]
    settings = {**FORGET, "RETRY_ENABLED": False, "CONCURRENT_REQUESTS": 1, "JOBDIR": "job"}
    run = Crawl.held(looping, 2, tmp_path, settings, spider=FAILING_SPIDER)  # with robots.txt
    run.interrupt()  # while it waits for the answer
    assert (looping.hits["/moved"], looping.hits["/dead"]) == (1, 0), run.output
    run = Crawl.finished(looping.url, tmp_path, settings, spider=FAILING_SPIDER)
    assert 1 <= looping.hits["/dead"] <= 3
    # Where it led to, and where it came from.
    assert f"'bloom/forgotten': {2 * looping.hits['/dead']}," in run.output


OWN = """
from scrapy_bloom import BloomDupeFilter

class Own(BloomDupeFilter):
    def request_seen(self, request):
        return super().request_seen(request)
"""


@pytest.mark.parametrize(
    ("scheduler", "begun_with"),
    [
        ("scrapy_bloom.CrashSafeScheduler", {}),
        ("scrapy.core.scheduler.Scheduler", {}),
        # The request is in the queue before the subclass is asked about it.
        ("scrapy_bloom.CrashSafeScheduler", {**FORGET, "DUPEFILTER_CLASS": "own.Own"}),
    ],
    ids=["crash-safe", "scrapy", "subclass"],
)
def test_what_waited_in_a_job_is_forgotten_if_it_fails(
    scheduler: str, begun_with: dict[str, Any], looping: ScriptedSite, tmp_path: Path
) -> None:
    """Each in a way of its own, and what is redirected to it; retried, too."""
    (tmp_path / "own.py").write_text(OWN)
    dead = {"/dead": [500], "/dropped": [None], "/raises-at-once": [()]}
    moved: dict[str, list[Any]] = {"/old": ["/dead"], "/moved": ["/late"], "/late": [503]}
    looping.answers = {"/": [(*dead, *moved, "/fine", "/0")], **dead, **moved}
    settings = {"CONCURRENT_REQUESTS": 1, "JOBDIR": "job", "SCHEDULER": scheduler, **begun_with}
    options: dict[str, Any] = {
        "spider": FAILING_SPIDER,
        "prefix": ("env", f"PYTHONPATH={tmp_path}"),
    }
    run = Crawl.held(looping, 2, tmp_path, settings, **options)  # robots.txt, and the links
    run.interrupt()
    assert not looping.hits.keys() & {*dead, *moved}
    settings |= FORGET
    run = Crawl.finished(looping.url, tmp_path, settings, **options)
    assert looping.hits.keys() >= {*dead, *moved}
    looping.forget()
    looping.answers = {"/": looping.answers["/"]}
    run = Crawl.finished(looping.url, tmp_path, settings, **options)
    assert looping.hits == dict.fromkeys(["/robots.txt", "/", *dead, *moved], 1)


def test_those_that_wait_too_long_are_crawled_again_rather_than_lost() -> None:
    forgotten = ForgottenSet()
    forgetting = ForgetFailed(forgotten.add)
    names = [b"%d" % number for number in range(100_100)]
    for name in names:
        forgetting.redirected([name], b"queued " + name)
    assert forgotten.fingerprints == names[:100]
