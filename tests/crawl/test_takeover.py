"""CrashSafeScheduler goes on with a job of Scrapy's own scheduler: real crawls."""

import shutil
import signal
from pathlib import Path

import pytest
import scrapy.squeues

from scrapy_bloom.job.jobdir import DATABASE
from scrapy_bloom.queues.job_state import read_counts
from tests.support.crawls import Crawl, spider_with
from tests.support.sites import Site

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
    assert read_counts(path / "job" / DATABASE) == (0, 0)
    assert not list((path / "job").glob("*.tmp*"))


@all_kinds
@both_filters
def test_a_paused_job(kind: str, before: dict, tree: Site, tmp_path: Path) -> None:
    queue = queue_of(kind)
    paused(tree, tmp_path, {**JOB, **queue, **before})
    crawl = Crawl.finished(tree.url, tmp_path, {**SAFE, **queue})
    assert not crawl.our_lines("WARNING") + crawl.our_lines("ERROR")
    assert "'finish_reason': 'finished'" in crawl.output
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
        Crawl.finished(
            tree.url, tmp_path / name, {**scheduler, **ONE, **settings}, spider=spider
        )
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
    assert "The last run did not close" in warning
    assert "requests.queue.set-aside-" in warning
    assert not crawl.our_lines("ERROR")
    assert len(tree.hits) == PAGES
    assert not [path for path, count in tree.hits.items() if count > 1 and path != "/p/0"]
    check_taken_over(tmp_path)
    tree.forget()
    crawl = Crawl.finished(tree.url, tmp_path, {**SAFE, **queue_of(kind)})
    assert not crawl.our_lines("WARNING")
    assert list(tree.hits) == ["/p/0"]


def make_older(job: Path) -> None:
    import os

    for path in job.rglob("*"):
        status = path.stat()
        os.utime(path, (status.st_atime - 2, status.st_mtime - 2))


# A call of one of these functions, before or after which the process dies.
STEPS = {
    "an empty draft": ("takeover._fill", "before", 1),
    "a draft with two slices": ("takeover._store", "after", 2),
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


def killed_at(step: str, site: Site, path: Path) -> None:
    function, when, number = STEPS[step]
    spider = spider_with(path, DIES.format(function=function, when=when, number=number))
    assert Crawl(site.url, path, SAFE, spider=spider).finish() == -signal.SIGKILL


@pytest.mark.parametrize("step", STEPS)
@both_filters
def test_a_kill_while_a_paused_job_is_taken_over(
    step: str, before: dict, tree: Site, tmp_path: Path
) -> None:
    paused(tree, tmp_path, {**JOB, **before})
    killed_at(step, tree, tmp_path)
    crawl = Crawl.finished(tree.url, tmp_path, SAFE)
    assert not crawl.our_lines("WARNING") + crawl.our_lines("ERROR")
    assert len(tree.hits) == PAGES
    assert not [path for path, count in tree.hits.items() if count > 1 and path != "/p/0"]
    check_taken_over(tmp_path)


@pytest.mark.parametrize("step", STEPS)
@both_filters
def test_a_kill_while_a_killed_job_is_taken_over(
    step: str, before: dict, tree: Site, tmp_path: Path
) -> None:
    killed(tree, tmp_path, {**JOB, **before})
    tree.forget()
    killed_at(step, tree, tmp_path)
    crawl = Crawl.finished(tree.url, tmp_path, SAFE)
    assert len(crawl.our_lines("WARNING")) <= 1
    assert not crawl.our_lines("ERROR")
    assert len(tree.hits) == PAGES
    check_taken_over(tmp_path)


@pytest.mark.parametrize("step", ["an empty draft", "a closed draft"])
def test_scrapys_scheduler_goes_on_after_a_kill_during_the_takeover(
    step: str, tree: Site, tmp_path: Path
) -> None:
    paused(tree, tmp_path, JOB)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "job").glob("requests*/**/*")}
    killed_at(step, tree, tmp_path)
    after = {path: path.stat().st_mtime_ns for path in (tmp_path / "job").glob("requests*/**/*")}
    assert before == after
    crawl = Crawl.finished(tree.url, tmp_path, JOB)
    assert not crawl.our_lines("WARNING") + crawl.our_lines("ERROR")
    assert len(tree.hits) == PAGES
