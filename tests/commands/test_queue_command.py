"""`scrapy bloom queue`: what is pending, what comes next, and what failed."""

import pickle
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from lxml import html

from scrapy_bloom.job.jobdir import lock_job
from scrapy_bloom.queues import inbox
from scrapy_bloom.queues.serialized import serialized
from scrapy_bloom.queues.store import Entered, Joining, State
from tests.support import servers, stores
from tests.support.cli import bloom
from tests.support.crawls import SPIDER
from tests.support.jobs import PLACES, Job
from tests.support.request_queues import (
    Trap,
    enter,
    failed,
    take,
)
from tests.support.sites import ScriptedSite

UNREADABLE = "a request that cannot be read"
HOSTILE = "a.example\x1b[2J"
(LINK_TEXT,) = html.fromstring("<p>text</p>").xpath("text()")


def found(host: str, number: int, priority: int = 0) -> Entered:
    meta = {"depth": 2, "link_text": LINK_TEXT}  # as a CrawlSpider has it
    request = {"url": f"https://{host}/{number}", "priority": priority, "meta": meta}
    data = serialized(request)
    return Entered(data, slot=host, priority=priority, rank=0, newest_first=False)


def place_of(kind: str, directory: Path) -> tuple[stores.Place, tuple[str, ...]]:
    """A place, and the arguments of a command that name it."""
    if kind == "a job":
        return stores.InFiles(directory / "job"), ("job",)
    there = stores.InRedis(key=str(directory))
    return there, (f"{there.shared.url}#{there.shared.key}",)


def leave(there: stores.Place, *requests: Entered) -> None:
    enter(there.open(), *requests)
    there.close()


@pytest.fixture(params=["a job", "redis"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, ...]]:
    """A queue that no process uses: many requests of b.example, few of two others, and a trap."""
    trap = pickle.dumps({"url": Trap(tmp_path / "sprung")})
    requests = [found("b.example", number, priority=number) for number in range(20)]
    requests += [found(HOSTILE, number) for number in range(3)]
    requests += [Entered(trap, slot="trap.example", priority=0, rank=0, newest_first=False)]
    there, arguments = place_of(request.param, tmp_path)
    leave(there, *requests)
    yield arguments
    there.end()


def test_what_is_pending_and_what_comes_next(place: tuple[str, ...], tmp_path: Path) -> None:
    queue = bloom("queue", *place, "--next", "4", "--json", cwd=tmp_path).json
    assert (queue["pending"], queue["in_flight"], queue["dead"], queue["hosts"]) == (24, 0, 0, 3)
    assert [entry["pending"] for entry in queue["most_pending"]] == [20, 3, 1]
    assert queue["most_pending"][0]["host"] == "b.example"
    urls = [entry["url"] for entry in queue["next"]]
    assert sorted(urls[:3]) == sorted([f"https://{HOSTILE}/0", "https://b.example/19", UNREADABLE])
    assert urls[3] in [f"https://{HOSTILE}/1", "https://b.example/18"]  # in the order of hosts
    highest = queue["next"][urls.index("https://b.example/19")]
    assert (highest["priority"], highest["method"]) == (19, "GET")
    assert not (tmp_path / "sprung").exists()


def test_the_output_for_people(place: tuple[str, ...], tmp_path: Path) -> None:
    ran = bloom("queue", *place, cwd=tmp_path)
    assert ran.status == 0
    assert ": 24 pending; 0 done\n" in ran.out
    assert r"a.example\x1b[2J" in ran.out
    assert "\x1b" not in ran.out
    assert ran.out.count("https://b.example/") == 10 - 3 - 1
    assert not (tmp_path / "sprung").exists()
    listed = bloom("queue", *place, "--failed", "--dead", cwd=tmp_path).out
    assert re.fullmatch(r"0 requests of .+ \(failed, waiting, dead\)\n", listed)


def test_requests_without_a_host_are_dropped_by_the_name_in_the_table(tmp_path: Path) -> None:
    leave(stores.InFiles(tmp_path / "job"), found("", 1), found("b.example", 1))
    assert re.search(r"^\(any\) +1$", bloom("queue", "job", cwd=tmp_path).out, re.MULTILINE)
    ran = bloom("queue", "job", "--drop-host", "(any)", "--yes", cwd=tmp_path)
    assert ran.out == "1 pending request of (any) dropped\n"


def test_a_host_is_dropped(place: tuple[str, ...], tmp_path: Path) -> None:
    asked = bloom("queue", *place, "--drop-host", "b.example", cwd=tmp_path)
    assert "Drop 20 pending requests of b.example? They are not crawled" in asked.error
    for host, number in (("b.example", 20), (HOSTILE, 3)):
        ran = bloom("queue", *place, "--drop-host", host, "--yes", cwd=tmp_path)
        assert f"{number} pending requests of " in ran.out
        assert "\x1b" not in ran.out
    again = bloom("queue", *place, "--drop-host", "b.example", "--yes", cwd=tmp_path)
    assert again.out == "0 pending requests of b.example dropped\n"
    queue = bloom("queue", *place, "--json", cwd=tmp_path).json
    assert (queue["pending"], queue["hosts"]) == (1, 1)
    assert not (tmp_path / "sprung").exists()


def test_a_change_of_a_job_in_use_is_handed_over(tmp_path: Path) -> None:
    job = tmp_path / "job"
    leave(stores.InFiles(job), found("ads.example", 1), found("b.example", 1))
    lock = lock_job(job)
    ran = bloom("queue", job, "--drop-host", "ads.example", "--yes", cwd=tmp_path)
    lock.release()
    assert ran.out == (
        f"The change of 1 pending request of ads.example was handed over to the crawl of {job}\n"
    )
    assert inbox.read(job) == [(1, inbox.Move(State.PENDING, None, "ads.example"))]
    queue = bloom("queue", job, "--json", cwd=tmp_path).json
    assert (queue["pending"], queue["handed_over"]) == (2, 0)
    # The next command makes it, too, if no crawl does.
    ran = bloom("queue", job, "--drop-host", "b.example", "--yes", cwd=tmp_path)
    assert ran.out == "1 pending request of b.example dropped\n"
    assert bloom("queue", job, "--json", cwd=tmp_path).json["pending"] == 0
    assert not inbox.read(job)


# Failed requests.


def failing(host: str) -> Entered:
    return found(host, 1)._replace(fingerprint=host.encode().rjust(20, b"."))


@pytest.fixture(params=["a job", "redis"])
def failures(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, ...]]:
    """The arguments of a queue: a page has failed in six runs, one in two, and two in the last."""
    there, arguments = place_of(request.param, tmp_path)
    for run, hosts in enumerate([["dead.example"], [], [], [], ["old.example"], ["a.example"] * 2]):
        store = there.open(Joining("shop", str(run)))
        new = [failing(host if number == 0 else f"b.{host}") for number, host in enumerate(hosts)]
        enter(store, *new)
        while request_taken := take(store):
            failed(store, request_taken, "HTTP status 503")
        there.close()
    yield arguments
    there.end()


def test_failed_requests_are_listed(failures: tuple[str, ...], tmp_path: Path) -> None:
    queue = bloom("queue", *failures, "--json", cwd=tmp_path).json
    assert (queue["pending"], queue["failed"], queue["dead"]) == (0, 3, 1)
    rows = bloom("queue", *failures, "--failed", "--dead", "--json", cwd=tmp_path).json["requests"]
    assert {(each_row["url"], each_row["state"], each_row["tries"]) for each_row in rows} == {
        ("https://a.example/1", "failed", 1),
        ("https://b.a.example/1", "failed", 1),
        ("https://old.example/1", "failed", 2),
        ("https://dead.example/1", "dead", 5),
    }
    assert {each_row["reason"] for each_row in rows} == {"HTTP status 503"}
    lines = bloom("queue", *failures, "--failed", cwd=tmp_path).out.splitlines()
    assert re.fullmatch(r"3 requests of .+ \(failed, waiting\)", lines[0])
    row = ["failed", "2", "https://old.example/1", "HTTP", "status", "503"]
    assert row in [line.split() for line in lines]
    assert "dead.example" not in "".join(lines)
    queue = bloom("info", *failures, "--json", cwd=tmp_path).json["queue"]
    assert (queue["failed"], queue["dead"], queue["done"]) == (3, 1, 0)
    assert (queue["spider"], queue["run"], queue["handed_over"]) == ("shop", "5", 0)
    assert queue["workers"] == []
    text = bloom("info", *failures, cwd=tmp_path).out
    assert " 0 pending, 3 failed, 1 dead; 0 done" in text
    assert bloom("report", *failures, "-o", "page.html", cwd=tmp_path).status == 0
    assert "https://dead.example/1" in (tmp_path / "page.html").read_text()
    metrics = bloom("info", *failures, "--format", "prometheus", cwd=tmp_path).out
    assert "scrapy_bloom_failed{" in metrics


@pytest.mark.parametrize(
    ("options", "what", "left"),
    [
        (("--failed", "--requeue"), "3 failed requests of ", (3, 0, 1)),
        (("--dead", "--requeue"), "1 dead request of ", (1, 3, 0)),
        (("--requeue",), "4 failed and dead requests of ", (4, 0, 0)),
        (("--failed", "--drop"), "3 failed requests of ", (0, 0, 1)),
        (("--drop",), "4 failed and dead requests of ", (0, 0, 0)),
    ],
    ids=str,
)
def test_failed_requests_are_requeued_and_dropped(
    options: tuple[str, ...],
    what: str,
    left: tuple[int, int, int],
    failures: tuple[str, ...],
    tmp_path: Path,
) -> None:
    assert f" {what}" in bloom("queue", *failures, *options, cwd=tmp_path).error
    done = bloom("queue", *failures, "--json", cwd=tmp_path).json["done"]
    ran = bloom("queue", *failures, *options, "--yes", cwd=tmp_path)
    fate = "dropped" if "--drop" in options else "will be crawled again"
    assert ran.out.startswith(what)
    assert ran.out.endswith(f" {fate}\n")
    queue = bloom("queue", *failures, "--json", cwd=tmp_path).json
    assert (queue["pending"], queue["failed"], queue["dead"]) == left
    assert queue["done"] == done + (4 - sum(left))


@pytest.mark.parametrize("place", PLACES)
def test_a_crawl_that_runs_tries_failed_requests_again(place: str, tmp_path: Path) -> None:
    pages = [f"/page/{number}" for number in range(9)]
    with ScriptedSite({"/": [tuple(pages)], **{path: [503, ()] for path in pages}}) as site:
        job = Job(place, tmp_path, site, SPIDER, CONCURRENT_REQUESTS=1)
        crawls = job.hold(5)
        servers.wait_for(lambda: len(job.failed) == 4, lambda: str(job.failed))
        again = job.failed
        ran = job.bloom("queue", "--failed", "--requeue", "--yes")
        if job.is_shared:
            assert "4 failed requests of " in ran.out
        else:
            assert "The change of 4 failed requests of job was handed over to the crawl" in ran.out
        servers.wait_for(lambda: not job.failed, lambda: str(job.failed))
        counts = job.counts
        assert counts["pending"] + counts["in_flight"] == len(pages)
        job.finish(crawls)
        assert {path for path in pages if site.hits[path] == 2} == again
        assert job.failed == set(pages) - again
        assert re.search(r"ended\s+at\s+20[-\d]+\s+[\d:]+\s+UTC", job.bloom("info").out)
        job.bloom("queue", "--failed", "--requeue", "--yes")
        assert job.bloom("info", "--json").json["queue"]["ended_at"] is None
