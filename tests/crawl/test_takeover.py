"""CrashSafeScheduler goes on with a job of Scrapy's own scheduler: real crawls."""

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import queuelib.queue
import scrapy.squeues

from scrapy_bloom.crawl.scheduler.takeover import _requests
from scrapy_bloom.job.jobdir import DATABASE
from tests.support.crawls import RULES_SPIDER, SPIDER, Crawl, spider_with, stat
from tests.support.request_queues import counts_in
from tests.support.sites import ScriptedSite, Site
from tests.support.workspace import in_redis

PAGES = 60  # of the tree
KINDS = [
    kind
    for kind in (
        "PickleLifoDiskQueue",
        "PickleFifoDiskQueue",
        "MarshalLifoDiskQueue",
        "MarshalFifoDiskQueue",
        "PickleLifoSQLiteQueue",
        "PickleFifoSQLiteQueue",
        "MarshalLifoSQLiteQueue",
        "MarshalFifoSQLiteQueue",
    )
    if hasattr(scrapy.squeues, kind)  # those of SQLite come with Scrapy 2.19
]
JOB = {"JOBDIR": "job", "CONCURRENT_REQUESTS": 4}
SAFE = {**JOB, "SCHEDULER": "scrapy_bloom.CrashSafeScheduler"}
BY_PRIORITY = {"SCHEDULER_PRIORITY_QUEUE": "scrapy.pqueues.ScrapyPriorityQueue"}
# No download before the last response is through, or it is a race which links come first.
ONE = {"CONCURRENT_REQUESTS": 1, "SCRAPER_SLOT_MAX_ACTIVE_SIZE": 1}
FILTERS = {
    "RFPDupeFilter": {"DUPEFILTER_CLASS": "scrapy.dupefilters.RFPDupeFilter"},
    "BloomDupeFilter": {},
}

all_kinds = pytest.mark.parametrize("kind", KINDS)
both_filters = pytest.mark.parametrize("before", FILTERS.values(), ids=FILTERS)

# Start requests and priorities, so that there are several queues.
STARTS = """
class LinkSpider(LinkSpider):
    async def start(self):
        yield scrapy.Request(self.start_urls[0], dont_filter=True)
        for number in range(20, 40):
            yield scrapy.Request(f"{self.start_urls[0]}p/{number}", priority=number % 3 - 1)

    def parse(self, response):
        for number, request in enumerate(super().parse(response)):
            yield request.replace(priority=number % 4 - 1)
"""


def queue_of(kind: str) -> dict[str, str]:
    return {"SCHEDULER_DISK_QUEUE": f"scrapy.squeues.{kind}"}


def paused(site: Site, path: Path, settings: dict, answers: int = 12, **options: Path) -> None:
    crawl = Crawl.held(site, answers, path, settings, **options)
    assert crawl.interrupt() == 0
    site.settle()
    assert len(site.hits) < PAGES
    assert (path / "job/requests.queue/active.json").exists()


def killed(site: Site, path: Path, settings: dict, answers: int = 20) -> None:
    Crawl.held(site, answers, path, settings).kill()
    site.settle()
    assert len(site.hits) < PAGES


def check_taken_over(path: Path) -> None:
    """Its queue is kept, and the database is done with."""
    assert not (path / "job/requests.queue").exists()
    assert len(list((path / "job").glob("requests.queue.set-aside-*"))) == 1
    assert counts_in(path / "job" / DATABASE) == (0, 0)
    assert not list((path / "job").glob("*.tmp*"))


@all_kinds
@both_filters
def test_a_paused_job(kind: str, before: dict, tree: Site, tmp_path: Path) -> None:
    queue = queue_of(kind)
    spider = RULES_SPIDER if "Pickle" in kind else SPIDER  # marshal cannot store objects
    paused(tree, tmp_path, {**JOB, **queue, **before}, spider=spider)
    crawl = Crawl.finished(tree.url, tmp_path, {**SAFE, **queue}, spider=spider)
    assert not crawl.our_lines("WARNING") + crawl.our_lines("ERROR")
    assert "'finish_reason': 'finished'" in crawl.output
    assert "spider_exceptions" not in crawl.output
    assert len(tree.hits) == PAGES
    # The start page is not filtered.
    assert not [path for path, count in tree.hits.items() if count > 1 and path != "/p/0"]
    check_taken_over(tmp_path)


@all_kinds
@pytest.mark.parametrize("by_priority", [{}, BY_PRIORITY], ids=["by slot", "by priority"])
def test_in_the_order_of_scrapys_scheduler(
    kind: str, by_priority: dict, tree: Site, tmp_path: Path
) -> None:
    spider = spider_with(tmp_path, STARTS)
    settings = {**by_priority, **queue_of(kind), "SCHEDULER_START_DISK_QUEUE": None}
    if "Pickle" in kind:
        settings["SCHEDULER_START_DISK_QUEUE"] = f"scrapy.squeues.{kind}"
    paused(tree, tmp_path / "scrapy", {**JOB, **ONE, **settings}, spider=spider)
    pending = list((tmp_path / "scrapy/job/requests.queue").rglob("*s"))
    assert pending or "Pickle" not in kind
    shutil.copytree(tmp_path / "scrapy/job", tmp_path / "ours/job")
    orders = []
    for name, scheduler in (("scrapy", JOB), ("ours", SAFE)):
        tree.forget()
        Crawl.finished(tree.url, tmp_path / name, {**scheduler, **ONE, **settings}, spider=spider)
        orders.append(list(tree.hits.items()))
    assert len(orders[0]) > 20
    assert orders[0] == orders[1]
    check_taken_over(tmp_path / "ours")


@all_kinds
@both_filters
@pytest.mark.parametrize("is_resumed", [False, True], ids=["first run", "paused before"])
def test_a_killed_job(
    kind: str, before: dict, is_resumed: bool, tree: Site, tmp_path: Path
) -> None:
    settings = {**JOB, **queue_of(kind), **before}
    if is_resumed:
        paused(tree, tmp_path, settings)
        # Scrapy's own files tell of a kill only if it comes a second after the pause.
        make_older(tmp_path / "job")
    killed(tree, tmp_path, settings)
    tree.forget()
    crawl = Crawl.finished(tree.url, tmp_path, {**SAFE, **queue_of(kind)})
    (warning,) = crawl.our_lines("WARNING")
    assert "The last process did not close" in warning
    assert "requests.queue.set-aside-" in warning
    assert not crawl.our_lines("ERROR")
    assert len(tree.hits) == PAGES
    assert not [path for path, count in tree.hits.items() if count > 1 and path != "/p/0"]
    check_taken_over(tmp_path)
    tree.forget()
    settings = {**SAFE, **queue_of(kind), "BLOOM_RUN": "another"}
    crawl = Crawl.finished(tree.url, tmp_path, settings)
    assert not crawl.our_lines("WARNING")
    assert list(tree.hits) == ["/p/0"]


def make_older(job: Path) -> None:
    for path in job.rglob("*"):
        status = path.stat()
        os.utime(path, (status.st_atime - 2, status.st_mtime - 2))


# A call of one of these functions, before or after which the process dies.
STEPS = {
    "an empty draft": ("takeover._fill", "before", 1),
    "a draft with a slice": ("takeover._store", "after", 1),
    "a complete draft": ("takeover._fill", "after", 1),
    "a closed draft": ("takeover.Path.replace", "before", 1),
    "the database": ("takeover.Path.replace", "after", 1),
    "the filter is not open": ("scheduler.LocalBackend.open", "before", 1),
    "the filter lacks the requests": ("scheduler.LocalBackend._recover", "before", 1),
    "the log is open": ("scheduler.LocalBackend._apply", "before", 1),
    "the filter is open": ("scheduler.LocalBackend.open", "after", 1),
    "the queue is not renamed": ("scheduler.jobdir.set_aside", "before", 1),
    "the queue is renamed": ("scheduler.jobdir.set_aside", "after", 1),
}
DIES = """
import os, signal
from scrapy_bloom.crawl.scheduler import scheduler, takeover

takeover._SLICE = 3

def dies(method, when, number):
    def function(*args, **kwargs):
        nonlocal number
        number -= 1
        if number == 0 and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = method(*args, **kwargs)
        if number == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return result
    return function

*path, last = {function!r}.split(".")
owner = globals()[path[0]]
for part in path[1:]:
    owner = getattr(owner, part)
setattr(owner, last, dies(getattr(owner, last), {when!r}, {number}))
"""


@pytest.fixture
def wide() -> Iterator[Site]:
    """A start page with links to all others, so that many are pending whenever a crawl ends."""
    with ScriptedSite({"/": [tuple(f"/{number}" for number in range(1, PAGES))]}) as site:
        yield site


def killed_at(step: str, site: Site, path: Path) -> Crawl:
    function, when, number = STEPS[step]
    spider = spider_with(path, DIES.format(function=function, when=when, number=number))
    crawl = Crawl(site.url, path, SAFE, spider=spider)
    assert crawl.finish() == -signal.SIGKILL
    return crawl


@pytest.mark.parametrize("step", STEPS)
@both_filters
def test_a_kill_while_a_paused_job_is_taken_over(
    step: str, before: dict, wide: Site, tmp_path: Path
) -> None:
    paused(wide, tmp_path, {**JOB, **before})
    killed_at(step, wide, tmp_path)
    crawl = Crawl.finished(wide.url, tmp_path, SAFE)
    assert not crawl.our_lines("WARNING") + crawl.our_lines("ERROR")
    assert len(wide.hits) == PAGES
    assert not [path for path, count in wide.hits.items() if count > 1 and path != "/"]
    check_taken_over(tmp_path)


@pytest.mark.parametrize("step", STEPS)
@both_filters
def test_a_kill_while_a_killed_job_is_taken_over(
    step: str, before: dict, wide: Site, tmp_path: Path
) -> None:
    killed(wide, tmp_path, {**JOB, **before})
    wide.forget()
    interrupted = killed_at(step, wide, tmp_path)
    crawl = Crawl.finished(wide.url, tmp_path, SAFE)
    assert len(crawl.our_lines("WARNING")) <= 1
    if step != "the queue is renamed":  # the line comes right after that
        assert interrupted.our_lines("WARNING") + crawl.our_lines("WARNING")
    assert not crawl.our_lines("ERROR")
    assert len(wide.hits) == PAGES
    check_taken_over(tmp_path)


@pytest.mark.parametrize("step", ["an empty draft", "a closed draft"])
def test_scrapys_scheduler_goes_on_after_a_kill_during_the_takeover(
    step: str, wide: Site, tmp_path: Path
) -> None:
    paused(wide, tmp_path, JOB)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "job").glob("requests*/**/*")}
    killed_at(step, wide, tmp_path)
    after = {path: path.stat().st_mtime_ns for path in (tmp_path / "job").glob("requests*/**/*")}
    assert before == after
    crawl = Crawl.finished(wide.url, tmp_path, JOB)
    assert not crawl.our_lines("WARNING") + crawl.our_lines("ERROR")
    assert len(wide.hits) == PAGES


# Other jobs.


def test_a_job_in_which_each_scheduler_had_a_turn(tree: Site, tmp_path: Path) -> None:
    """The database is there already, without a pending request."""
    spider = spider_with(
        tmp_path, "async def start(self):\n    for _ in (): yield\nLinkSpider.start = start\n"
    )
    Crawl.finished(tree.url, tmp_path, SAFE, spider=spider)
    assert counts_in(tmp_path / "job" / DATABASE) == (0, 0)
    paused(tree, tmp_path, JOB)
    crawl = Crawl.finished(tree.url, tmp_path, SAFE)
    assert not crawl.our_lines("WARNING") + crawl.our_lines("ERROR")
    assert len(tree.hits) == PAGES
    check_taken_over(tmp_path)


def test_two_queues_with_pending_requests(tree: Site, tmp_path: Path) -> None:
    """Somebody put the queue back that was taken over: both queues are crawled."""
    paused(tree, tmp_path, JOB, answers=8)
    shutil.copytree(tmp_path / "job/requests.queue", tmp_path / "copy")
    assert Crawl.held(tree, 8, tmp_path, SAFE).interrupt() == 0
    assert counts_in(tmp_path / "job" / DATABASE)[0]
    (tmp_path / "copy").rename(tmp_path / "job/requests.queue")
    (tmp_path / "job/requests.queue/active.json").touch()
    crawl = Crawl.finished(tree.url, tmp_path, SAFE)
    assert not crawl.our_lines("WARNING") + crawl.our_lines("ERROR")
    assert len(tree.hits) == PAGES
    assert counts_in(tmp_path / "job" / DATABASE) == (0, 0)


@pytest.mark.parametrize("kind", KINDS[:4])
def test_requests_that_cannot_be_read(kind: str, tree: Site, tmp_path: Path) -> None:
    """Their callback has another name: they stay until the spider has it again."""
    spider = spider_with(tmp_path, "LinkSpider.older = LinkSpider.parse\n" + OTHER_CALLBACK)
    settings = queue_of(kind)
    paused(tree, tmp_path, {**JOB, **settings}, spider=spider)
    crawl = Crawl.finished(tree.url, tmp_path, {**SAFE, **settings})
    assert not crawl.our_lines("WARNING")
    (error,) = crawl.our_lines("ERROR")
    assert "Method 'older' not found" in error
    number = stat(crawl, "scheduler/unreadable")
    assert counts_in(tmp_path / "job" / DATABASE) == (number, 0)
    assert len(tree.hits) < PAGES
    crawl = Crawl.finished(tree.url, tmp_path, {**SAFE, **settings}, spider=spider)
    assert not crawl.our_lines("WARNING") + crawl.our_lines("ERROR")
    assert len(tree.hits) == PAGES
    check_taken_over(tmp_path)


OTHER_CALLBACK = """
def parse(self, response, parse=LinkSpider.parse):
    for request in parse(self, response):
        yield request.replace(callback=self.older)

LinkSpider.parse = LinkSpider.older = parse
"""


def test_a_killed_job_in_which_nothing_is_filtered(tmp_path: Path) -> None:
    pages = [f"/{number}" for number in range(40)]
    with ScriptedSite({"/": [tuple(pages)]}) as site:
        settings = {"DUPEFILTER_CLASS": "scrapy.dupefilters.BaseDupeFilter"}
        Crawl.held(site, 8, tmp_path, {**JOB, **settings}).kill()
        crawl = Crawl.finished(site.url, tmp_path, {**SAFE, **settings})
        (warning,) = crawl.our_lines("WARNING")
        assert "The last process did not close" in warning
        assert site.hits.keys() == {"/", *pages}
        check_taken_over(tmp_path)
        assert not (tmp_path / "job/bloom/generation-0001.bloom").exists()


def test_not_with_the_queue_in_redis(tree: Site, tmp_path: Path) -> None:
    paused(tree, tmp_path, JOB)
    line = Crawl(tree.url, tmp_path, in_redis(tmp_path.name, **SAFE)).refusal()
    assert "job is a job of Scrapy's own scheduler" in line
    assert "because BLOOM_REDIS_URL is set" in line
    Crawl.finished(tree.url, tmp_path, SAFE)
    assert len(tree.hits) == PAGES


@pytest.mark.parametrize("kind", KINDS[:2])
def test_a_damaged_file_of_a_paused_job(kind: str, tree: Site, tmp_path: Path) -> None:
    """It is an incomplete copy, say: nothing in its filter may be taken for crawled."""
    paused(tree, tmp_path, {**JOB, **queue_of(kind)})
    queue = tmp_path / "job/requests.queue"
    file = max((path for path in queue.rglob("*") if path.is_file()), key=os.path.getsize)
    times = file.stat().st_atime_ns, file.stat().st_mtime_ns
    os.truncate(file, file.stat().st_size - 5)
    os.utime(file, ns=times)
    before = sorted((tmp_path / "job").rglob("*"))
    line = Crawl(tree.url, tmp_path, SAFE).refusal()
    assert "is damaged: " in line
    assert f"or remove {queue / 'active.json'}" in line
    assert sorted((tmp_path / "job").rglob("*")) == before
    (queue / "active.json").unlink()
    tree.forget()
    crawl = Crawl.finished(tree.url, tmp_path, SAFE)
    assert len(crawl.our_lines("WARNING")) == 1
    assert len(tree.hits) == PAGES


def test_an_error_after_the_takeover(tree: Site, tmp_path: Path) -> None:
    """Scrapy's scheduler still goes on with the job: its queue is the only one."""
    settings = {**JOB, **FILTERS["RFPDupeFilter"]}
    paused(tree, tmp_path, settings)
    seen = tmp_path / "job/requests.seen"
    contents = seen.read_bytes()
    seen.write_bytes(b"neither format of Scrapy")
    assert (
        "is in neither format of Scrapy's requests.seen"
        in Crawl(tree.url, tmp_path, SAFE).refusal()
    )
    assert not list((tmp_path / "job").glob("requests.sqlite*"))
    seen.write_bytes(contents)
    crawl = Crawl.finished(tree.url, tmp_path, settings)
    assert "Resuming crawl" in crawl.output
    assert len(tree.hits) == PAGES


# The files of queuelib.

REQUESTS = [b"\x80\x04request %d." % number + bytes(number) + b"." for number in range(12)]


def read(path: Path) -> list[bytes]:
    """Return what can be read of a file, and b"damaged" at the end if it says so."""
    found: list[bytes] = []
    try:
        found.extend(_requests(path))  # keeps what came before an error
    except ValueError:
        found.append(b"damaged")
    return found


def pushed(kind: str, path: Path, **options: Any) -> Any:
    queue = getattr(queuelib.queue, kind)(str(path), **options)
    for data in REQUESTS:
        queue.push(data)
    return queue


@pytest.mark.parametrize("pops", range(len(REQUESTS)))
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("LifoDiskQueue", {}),
        ("LifoSQLiteQueue", {}),
        ("FifoSQLiteQueue", {}),
        ("FifoDiskQueue", {}),
        ("FifoDiskQueue", {"chunksize": 1}),
        ("FifoDiskQueue", {"chunksize": 4}),
        ("FifoDiskQueue", {"chunksize": 5}),
    ],
)
def test_reads_what_queuelib_would_return(
    kind: str, options: dict, pops: int, tmp_path: Path
) -> None:
    queue = pushed(kind, tmp_path / "0", **options)
    for _ in range(pops):
        queue.pop()
    queue.close()
    left = REQUESTS[: len(REQUESTS) - pops] if kind.startswith("Lifo") else REQUESTS[pops:]
    assert read(tmp_path / "0") == left


def test_a_stack_that_ends_anywhere(tmp_path: Path) -> None:
    """A kill leaves what Python had written by then."""
    pushed("LifoDiskQueue", tmp_path / "0").close()
    contents = (tmp_path / "0").read_bytes()
    end, complete = 4, {4: 0}
    for number, data in enumerate(REQUESTS, 1):
        end += len(data) + 4
        complete[end] = number
    for size in range(len(contents) + 1):
        (tmp_path / "0").write_bytes(contents[:size])
        number = max((count for at, count in complete.items() if at <= size), default=0)
        found = read(tmp_path / "0")
        assert found[:number] == REQUESTS[:number], size
        assert set(found[number:]) <= {b"damaged"}, size
        assert (found[-1:] == [b"damaged"]) == (4 < size < len(contents)), size


def test_chunks_that_end_anywhere(tmp_path: Path) -> None:
    pushed("FifoDiskQueue", tmp_path / "0", chunksize=4).close()
    last = tmp_path / "0/q00002"
    contents = last.read_bytes()
    for size in range(len(contents)):
        last.write_bytes(contents[:size])
        found = read(tmp_path / "0")
        assert found.pop() == b"damaged"
        assert found == REQUESTS[: len(found)]
        assert len(found) >= 8


@pytest.mark.parametrize("text", ["", '{"chunk', None])
def test_chunks_without_their_state(text: str | None, tmp_path: Path) -> None:
    pushed("FifoDiskQueue", tmp_path / "0", chunksize=4).close()
    (tmp_path / "0/info.json").unlink()
    if text is not None:
        (tmp_path / "0/info.json").write_text(text)
    damaged = [b"damaged"] if text is not None else []
    assert read(tmp_path / "0") == REQUESTS + damaged


def test_chunks_with_the_state_of_an_earlier_pause(tmp_path: Path) -> None:
    """The first chunks are gone since: they were crawled."""
    pushed("FifoDiskQueue", tmp_path / "0", chunksize=4).close()
    queue = queuelib.queue.FifoDiskQueue(str(tmp_path / "0"))
    for _ in range(6):
        queue.pop()
    found = read(tmp_path / "0")  # a kill
    assert found == [*REQUESTS[4:], b"damaged"]


@pytest.mark.parametrize("contents", [b"", b"\0\0", b"\0\0\0\0"])
def test_an_empty_stack(contents: bytes, tmp_path: Path) -> None:
    (tmp_path / "0").write_bytes(contents)
    assert read(tmp_path / "0") == []


@pytest.mark.parametrize("contents", [b"some text that is no queue", bytes(10_000), b"\xff" * 999])
def test_what_is_no_stack(contents: bytes, tmp_path: Path) -> None:
    (tmp_path / "0").write_bytes(contents)
    assert read(tmp_path / "0") == [b"damaged"]


def test_a_database_of_another_kind(tmp_path: Path) -> None:
    pushed("LifoSQLiteQueue", tmp_path / "0").close()
    contents = (tmp_path / "0").read_bytes()
    (tmp_path / "0").write_bytes(contents[:100] + bytes(len(contents) - 100))
    assert read(tmp_path / "0") == [b"damaged"]
