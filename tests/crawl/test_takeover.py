"""CrashSafeScheduler goes on with a job of Scrapy's own scheduler: real crawls."""

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import scrapy.squeues

from scrapy_bloom.job.jobdir import FILE
from tests.support.crawls import RULES_SPIDER, SPIDER, Crawl, spider_with, stat
from tests.support.request_queues import counts_in
from tests.support.sites import ScriptedSite, Site
from tests.support.workspace import in_redis, make_older

PAGES = 40  # of the tree
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
SCRAPYS = {"DUPEFILTER_CLASS": "scrapy.dupefilters.RFPDupeFilter"}

# Scrapy's filter and ours in turn.
FILTERS = [(kind, [SCRAPYS, {}][number % 2]) for number, kind in enumerate(KINDS)]

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


@pytest.fixture
def wide() -> Iterator[Site]:
    """A start page with links to all others, so that many are pending whenever a crawl ends."""
    with ScriptedSite({"/": [tuple(f"/{number}" for number in range(1, PAGES))]}) as site:
        yield site


def queue_of(kind: str) -> dict[str, str]:
    return {"SCHEDULER_DISK_QUEUE": f"scrapy.squeues.{kind}"}


def paused(site: Site, path: Path, settings: dict, answers: int = 8, **options: Path) -> None:
    crawl = Crawl.held(site, answers, path, settings, **options)
    assert crawl.interrupt() == 0
    site.settle()
    assert len(site.hits) < PAGES
    assert (path / "job/requests.queue/active.json").exists()


def killed(site: Site, path: Path, settings: dict, answers: int = 12) -> None:
    Crawl.held(site, answers, path, settings).kill()
    site.settle()
    assert len(site.hits) < PAGES


def check_taken_over(path: Path) -> None:
    """Its queue is kept, and nothing is pending."""
    assert not (path / "job/requests.queue").exists()
    assert len(list((path / "job").glob("requests.queue.set-aside-*"))) == 1
    assert counts_in(path / "job" / FILE) == (0, 0)
    check_no_copy(path)


def check_no_copy(path: Path) -> None:
    assert not list((path / "job").glob("*.tmp*"))


@pytest.mark.parametrize(("kind", "before"), FILTERS)
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


@pytest.mark.parametrize(
    ("kind", "by_priority"),
    [(kind, [{}, BY_PRIORITY][number % 2]) for number, kind in enumerate(KINDS)],
)
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
    assert len(orders[0]) > 15
    assert orders[0] == orders[1]
    check_taken_over(tmp_path / "ours")


@pytest.mark.parametrize(
    ("kind", "before", "is_resumed"),
    [(*each_filter, number % 4 < 2) for number, each_filter in enumerate(FILTERS)],
)
def test_a_killed_job(
    kind: str, before: dict, is_resumed: bool, wide: Site, tmp_path: Path
) -> None:
    settings = {**JOB, **queue_of(kind), **before}
    if is_resumed:
        paused(wide, tmp_path, settings)
        make_older(tmp_path / "job")
    killed(wide, tmp_path, settings)
    wide.forget()
    crawl = Crawl.finished(wide.url, tmp_path, {**SAFE, **queue_of(kind)})
    (warning,) = crawl.our_lines("WARNING")
    assert "The last process did not close" in warning
    assert "an empty filter and the requests of the queue" in warning
    assert not crawl.our_lines("ERROR")
    assert len(wide.hits) == PAGES
    assert not [path for path, count in wide.hits.items() if count > 1 and path != "/"]
    check_taken_over(tmp_path)
    wide.forget()
    settings = {**SAFE, **queue_of(kind), "BLOOM_RUN": "another"}
    crawl = Crawl.finished(wide.url, tmp_path, settings)
    assert not crawl.our_lines("WARNING")
    assert list(wide.hits) == ["/"]


# A call of one of these functions, before, after or at the commit of which the process dies.
STEPS = {
    "a partial copy": ("takeover.shutil.copyfile", "after", 1),
    "no filter": ("sqlite_store.LocalBackend.open", "before", 1),
    "a filter": ("sqlite_store.LocalBackend.open", "after", 1),
    "nothing": ("sqlite_store.SQLiteStore._take_over", "before", 1),
    "a slice": ("sqlite_store.islice", "before", 2),
    "an open transaction": ("sqlite_store.SQLiteStore._take_over", "at the commit", 1),
    "the requests": ("sqlite_store.SQLiteStore._take_over", "after", 1),
    "a run": ("takeover.jobdir.set_aside", "before", 1),
    "a renamed queue": ("takeover.jobdir.set_aside", "after", 1),
}
DIES = """
import os, signal
from scrapy_bloom.crawl.scheduler import takeover
from scrapy_bloom.queues import sqlite_store

sqlite_store._FILLED_AT_ONCE = 3

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def dies(method, when, number):
    def function(*args, **kwargs):
        nonlocal number
        number -= 1
        if number == 0 and when == "before":
            die()
        if when == "at the commit":
            db = args[0]._database.file._db
            db.set_trace_callback(lambda query: query == "COMMIT" and die())
        result = method(*args, **kwargs)
        if number == 0:
            die()
        return result
    return function

*path, last = {function!r}.split(".")
owner = globals()[path[0]]
for part in path[1:]:
    owner = getattr(owner, part)
setattr(owner, last, dies(getattr(owner, last), {when!r}, {number}))
"""


def killed_at(step: str, site: Site, path: Path) -> Crawl:
    function, when, number = STEPS[step]
    spider = spider_with(path, DIES.format(function=function, when=when, number=number))
    crawl = Crawl(site.url, path, SAFE, spider=spider)
    assert crawl.finish() == -signal.SIGKILL
    return crawl


@pytest.mark.parametrize(
    ("is_killed", "step"),
    # Scrapy's queue returns nothing of a job that was killed, so there is no slice.
    [(False, step) for step in STEPS]
    + [(True, step) for step in ("no filter", "an open transaction", "a run", "a renamed queue")],
)
def test_a_kill_while_a_job_is_taken_over(
    is_killed: bool, step: str, wide: Site, tmp_path: Path
) -> None:
    paused(wide, tmp_path, {**JOB, **SCRAPYS})
    make_older(tmp_path / "job")
    if is_killed:
        killed(wide, tmp_path, {**JOB, **SCRAPYS})
        make_older(tmp_path / "job")
        wide.forget()
    interrupted = killed_at(step, wide, tmp_path)
    crawl = Crawl.finished(wide.url, tmp_path, SAFE)
    assert not crawl.our_lines("ERROR")
    warnings = crawl.our_lines("WARNING")
    assert len(warnings) <= is_killed
    if is_killed and step != "a renamed queue":  # the line comes right after that
        assert interrupted.our_lines("WARNING") + warnings
    assert len(wide.hits) == PAGES
    if not is_killed:
        assert not [path for path, count in wide.hits.items() if count > 1 and path != "/"]
    check_taken_over(tmp_path)


@pytest.mark.parametrize("step", ["nothing", "an open transaction"])
def test_scrapys_scheduler_goes_on_after_a_kill_during_the_takeover(
    step: str, wide: Site, tmp_path: Path
) -> None:
    paused(wide, tmp_path, JOB)
    queue = tmp_path / "job/requests.queue"
    before = {path: path.stat().st_mtime_ns for path in queue.rglob("*")}
    killed_at(step, wide, tmp_path)
    assert before == {path: path.stat().st_mtime_ns for path in queue.rglob("*")}
    crawl = Crawl.finished(wide.url, tmp_path, JOB)
    assert not crawl.our_lines("WARNING") + crawl.our_lines("ERROR")
    assert len(wide.hits) == PAGES


# Other jobs.


def test_two_queues_with_pending_requests(tree: Site, tmp_path: Path) -> None:
    """Somebody put the queue back that was taken over: both queues are crawled."""
    paused(tree, tmp_path, JOB, answers=8)
    shutil.copytree(tmp_path / "job/requests.queue", tmp_path / "copy")
    assert Crawl.held(tree, 8, tmp_path, SAFE).interrupt() == 0
    assert counts_in(tmp_path / "job" / FILE)[0]
    (tmp_path / "copy").rename(tmp_path / "job/requests.queue")
    (tmp_path / "job/requests.queue/active.json").touch()
    crawl = Crawl.finished(tree.url, tmp_path, SAFE)
    assert not crawl.our_lines("WARNING") + crawl.our_lines("ERROR")
    assert len(tree.hits) == PAGES
    assert counts_in(tmp_path / "job" / FILE) == (0, 0)


@pytest.mark.parametrize("kind", ["PickleLifoDiskQueue", "MarshalFifoDiskQueue"])
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
    assert counts_in(tmp_path / "job" / FILE) == (number, 0)
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


def test_not_with_the_queue_in_redis(tree: Site, tmp_path: Path) -> None:
    paused(tree, tmp_path, JOB)
    line = Crawl(tree.url, tmp_path, in_redis(tmp_path.name, **SAFE)).refusal()
    assert "job is a job of Scrapy's own scheduler" in line
    assert "because BLOOM_REDIS_URL is set" in line
    Crawl.finished(tree.url, tmp_path, SAFE)
    assert len(tree.hits) == PAGES


def largest_file(queue: Path) -> Path:
    return max((path for path in queue.rglob("*") if path.is_file()), key=os.path.getsize)


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 5)


def write_zeros(file: Path) -> None:
    """Leave what a power cut leaves: the size of the file is on the disk, and its end is not."""
    os.truncate(file, 4)
    os.truncate(file, 20_000_000)


@pytest.mark.parametrize(
    ("kind", "damage"),
    [(KINDS[0], cut), *((kind, write_zeros) for kind in KINDS[::4] + KINDS[1:2])],
)
def test_a_damaged_file(
    kind: str, damage: Callable[[Path], None], tree: Site, tmp_path: Path
) -> None:
    """After a pause, it may be an incomplete copy: its requests are not lost silently."""
    paused(tree, tmp_path, {**JOB, **queue_of(kind)})
    queue = tmp_path / "job/requests.queue"
    file = largest_file(queue)
    times = file.stat().st_atime_ns, file.stat().st_mtime_ns
    damage(file)
    os.utime(file, ns=times)
    before = sorted((tmp_path / "job").rglob("*"))
    settings = {**SAFE, **queue_of(kind)}
    line = Crawl(tree.url, tmp_path, settings).refusal()
    assert " is damaged, or not a queue of " in line
    assert str(queue) in line
    assert f"or remove {queue / 'active.json'}" in line
    assert sorted((tmp_path / "job").rglob("*")) == before
    (queue / "active.json").unlink()
    tree.forget()
    crawl = Crawl.finished(tree.url, tmp_path, settings)
    assert len(crawl.our_lines("WARNING")) == 1
    assert len(tree.hits) == PAGES
    check_taken_over(tmp_path)


def test_a_request_that_is_cut_off(tree: Site, tmp_path: Path) -> None:
    """A FifoDiskQueue returns what is left of it: it is reported, and kept."""
    settings = queue_of("PickleFifoDiskQueue")
    paused(tree, tmp_path, {**JOB, **settings})
    cut(largest_file(tmp_path / "job/requests.queue"))
    crawl = Crawl.finished(tree.url, tmp_path, {**SAFE, **settings})
    assert "cannot be deserialized" in crawl.our_lines("ERROR")[0]
    assert counts_in(tmp_path / "job" / FILE) == (1, 0)


def test_a_queue_of_another_class(tree: Site, tmp_path: Path) -> None:
    paused(tree, tmp_path, JOB)
    other = {**SAFE, **queue_of("PickleFifoDiskQueue")}
    line = Crawl(tree.url, tmp_path, other).refusal()
    assert "not a queue of scrapy.squeues.PickleFifoDiskQueue" in line
    check_no_copy(tmp_path)
    Crawl.finished(tree.url, tmp_path, SAFE)
    assert len(tree.hits) == PAGES


def test_a_link_in_the_queue(tree: Site, tmp_path: Path) -> None:
    paused(tree, tmp_path, JOB)
    file = largest_file(tmp_path / "job/requests.queue")
    other = file.rename(tmp_path / "other")
    contents = other.read_bytes()
    file.symlink_to(other)
    assert "is a symbolic link" in Crawl(tree.url, tmp_path, SAFE).refusal()
    assert other.read_bytes() == contents


def test_an_error_of_the_filter(tree: Site, tmp_path: Path) -> None:
    """Nothing is taken over: Scrapy's scheduler still goes on with the job."""
    settings = {**JOB, **SCRAPYS}
    paused(tree, tmp_path, settings)
    seen = tmp_path / "job/requests.seen"
    contents = seen.read_bytes()
    seen.write_bytes(b"neither format of Scrapy")
    assert (
        "is in neither format of Scrapy's requests.seen"
        in Crawl(tree.url, tmp_path, SAFE).refusal()
    )
    assert counts_in(tmp_path / "job" / FILE) == (0, 0)
    seen.write_bytes(contents)
    crawl = Crawl.finished(tree.url, tmp_path, settings)
    assert "Resuming crawl" in crawl.output
    assert len(tree.hits) == PAGES
