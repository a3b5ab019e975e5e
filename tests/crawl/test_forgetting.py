"""Pages that failed are crawled again: by a later link, and by the next run."""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from scrapy_bloom import StorageError
from scrapy_bloom.crawl.outcomes import ForgetFailed
from tests.support import servers
from tests.support.crawls import FAILING_SPIDER, SHARED_SPIDER, Crawl
from tests.support.sites import ScriptedSite

OLDEST_FIRST = {"SCHEDULER_DISK_QUEUE": "scrapy.squeues.PickleFifoDiskQueue"}
FORGET = {"BLOOM_FORGET_FAILED": True}


def place(name: str, directory: Path) -> dict[str, object]:
    """The settings of two runs that share a filter."""
    if name == "local":
        return {"BLOOM_DIR": directory / "filter"}
    key = f"{directory.name}-{time.time_ns()}"
    settings = {"BLOOM_REDIS_KEY": key}
    return {**settings, "BLOOM_REDIS_URL": servers.shared(name).url}


@pytest.fixture
def looping() -> Iterator[ScriptedSite]:
    """Ten pages in a row, each of which links to a dead one."""
    answers: dict[str, list] = {"/dead": [500], "/": [("/0", "/dead")]}
    answers |= {f"/{number}": [(f"/{number + 1}", "/dead")] for number in range(10)}
    with ScriptedSite(answers) as site:
        yield site


def test_a_dead_page_does_not_loop(looping: ScriptedSite, tmp_path: Path) -> None:
    settings = {**place("local", tmp_path), **FORGET, "RETRY_ENABLED": False}
    settings |= {"CONCURRENT_REQUESTS": 1, "ROBOTSTXT_OBEY": False}
    for times in (3, 1):  # in the second run, all else is known, and only the first page crawled
        looping.hits.clear()
        run = Crawl.finished(looping.url, tmp_path, settings, spider=FAILING_SPIDER)
        assert looping.hits["/dead"] == times
        assert f"'bloom/forgotten': {times}," in run.output
        assert not run.our_lines("ERROR")


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


def test_requests_redirected_to_a_page_are_forgotten_with_it() -> None:
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
    looping.answers["/"] = [("/moved", "/0")]
    for number in range(10):
        looping.answers[f"/{number}"] = [(f"/{number + 1}",)]
    settings = {**FORGET, "RETRY_ENABLED": False, "CONCURRENT_REQUESTS": 1, "JOBDIR": "job"}
    settings |= OLDEST_FIRST
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
def test_a_pending_request_of_a_job_is_forgotten_if_it_fails(
    scheduler: str, begun_with: dict[str, Any], looping: ScriptedSite, tmp_path: Path
) -> None:
    """Each in a way of its own, and what is redirected to it; retried, too."""
    (tmp_path / "own.py").write_text(OWN)
    dead = {"/dead": [500], "/dropped": [None], "/raises-at-once": [()]}
    moved: dict[str, list[Any]] = {"/old": ["/dead"], "/moved": ["/late"], "/late": [503]}
    looping.answers = {"/": [("/1", "/2", "/3", *dead, *moved)], **dead, **moved}
    settings = {"CONCURRENT_REQUESTS": 1, "JOBDIR": "job", "SCHEDULER": scheduler, **OLDEST_FIRST}
    settings |= begun_with
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
