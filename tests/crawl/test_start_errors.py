"""A crawl that cannot begin says why in one line, the last one, however it is started."""

import json
from pathlib import Path

import pytest
from filelock import FileLock

from tests.support import servers
from tests.support.crawls import (
    NO_REACTOR,
    SHARED_SPIDER,
    Crawl,
    run_script,
    spider_with,
)

NOWHERE = "http://127.0.0.1:9/"
BAD_RATE = {"BLOOM_ERROR_RATE": 7}
MESSAGE = "BLOOM_ERROR_RATE is '7'; set it to a number between 0 and 1"
SAFE = {"SCHEDULER": "scrapy_bloom.CrashSafeScheduler", "JOBDIR": "job"}
SCREEN = 24  # lines


def last_line(crawl: Crawl) -> str:
    """Return the last line of a crawl that failed, once it is checked that nothing hides it."""
    error = crawl.refusal()
    assert "Engine slot" not in crawl.output
    output = crawl.output.rpartition("INFO: Spider opened\n")[2]
    assert len(output.splitlines()) < SCREEN, output
    return error


@pytest.mark.parametrize(
    "settings",
    [
        {},
        NO_REACTOR,
        {"SCHEDULER": "scrapy_bloom.CrashSafeScheduler"},
    ],
    ids=["asyncio", "no reactor", "scheduler"],
)
def test_an_error_is_the_last_line(tmp_path: Path, settings: dict[str, object]) -> None:
    assert MESSAGE in last_line(Crawl(NOWHERE, tmp_path, {**BAD_RATE, **settings}))


_MINE = "from scrapy_bloom import BloomDupeFilter\n\nclass MyFilter(BloomDupeFilter):\n"
_OTHER_CODE = {
    "fingerprints, as in filters of before Scrapy 2.7": (
        """
    def request_fingerprint(self, request):
        return request.url.partition("?sid=")[0]
""",
        "MyFilter, the DUPEFILTER_CLASS, has a method request_fingerprint(), which is not called",
    ),
    "the constructor of Scrapy's filter": (
        """
    def __init__(self, path=None, debug=False, *, fingerprinter=None):
        super().__init__(path, debug, fingerprinter=fingerprinter)
""",
        "write `def __init__(self, **options): super().__init__(**options)`",
    ),
    "from_crawler() of a filter for Scrapy": (
        """
    @classmethod
    def from_crawler(cls, crawler):
        return cls(crawler.settings["JOBDIR"], False)
""",
        "one that begins with `new = super().from_crawler(crawler)`",
    ),
    "a scheduler that calls from_spider()": (
        """
from scrapy.core.scheduler import Scheduler

class MyScheduler(Scheduler):
    @classmethod
    def from_crawler(cls, crawler):
        return cls(MyFilter.from_spider(crawler.spider), crawler=crawler)
""",
        "the scheduler calls from_spider() of BloomDupeFilter, which is only for",
    ),
    "a second filter in an extension": (
        """
class MyExtension:
    @classmethod
    def from_crawler(cls, crawler):
        cls.df = MyFilter.from_crawler(crawler)
        return cls()
""",
        "BloomDupeFilter was created twice in this crawl, perhaps by an extension, and only one",
    ),
}


@pytest.mark.parametrize(("code", "message"), _OTHER_CODE.values(), ids=_OTHER_CODE)
def test_other_code(code: str, message: str, tmp_path: Path) -> None:
    spider = spider_with(tmp_path, _MINE + "    pass\n" * (code[1] != " ") + code)
    settings: dict[str, object] = {"DUPEFILTER_CLASS": "spider.MyFilter", "JOBDIR": "job"}
    if "MyScheduler" in code:
        settings = {"SCHEDULER": "spider.MyScheduler"}
    if "MyExtension" in code:
        settings["EXTENSIONS"] = json.dumps({"spider.MyExtension": 0})
    crawl = Crawl(NOWHERE, tmp_path, settings, spider=spider)
    assert message in last_line(crawl)


@pytest.mark.parametrize(
    ("url", "scheduler"),
    [("redis://:s3cret@h:6379/0", SAFE["SCHEDULER"]), ("valkey:/s3cret@h", None)],
)
def test_a_url_as_jobdir(url: str, scheduler: str | None, tmp_path: Path) -> None:
    """Only Scrapy itself shows the password: with the settings, before it makes the filter."""
    crawl = Crawl(NOWHERE, tmp_path, {"SCHEDULER": scheduler, "JOBDIR": url})
    error = last_line(crawl)
    assert "***@h" in error
    assert "which is a URL and not a directory; set BLOOM_REDIS_URL" in error
    lines = [line for line in crawl.output.splitlines() if "s3cret" in line]
    assert lines == [f" 'JOBDIR': '{url}',"]
    assert not list(tmp_path.glob("*:"))


def test_what_else_keeps_a_crawl_from_its_start(tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    (tmp_path / "job").mkdir()
    away = {
        "BLOOM_REDIS_URL": f"redis://me:secret@127.0.0.1:{servers.free_port()}/0",
        "BLOOM_REDIS_DEADLINE_SECS": 0.3,
    }
    assert "other" in last_line(Crawl(NOWHERE, tmp_path, {"JOBDIR": "other"}))
    assert "cannot be used" in last_line(Crawl(NOWHERE, tmp_path, away))
    scheduler, queue = "scrapy_redis.scheduler.Scheduler", servers.shared("valkey").url
    elsewhere = {**away, "SCHEDULER": scheduler, "REDIS_URL": queue}
    assert "cannot be used" in last_line(Crawl(NOWHERE, tmp_path, elsewhere, spider=SHARED_SPIDER))
    with FileLock(tmp_path / "job/bloom.lock"):
        for settings in ({"JOBDIR": "job"}, SAFE):
            assert "job is in use by another" in last_line(Crawl(NOWHERE, tmp_path, settings))
    assert "secret" not in "".join(path.read_text() for path in tmp_path.glob("*.log"))


def test_an_error_is_on_the_terminal_where_the_log_is_not(tmp_path: Path) -> None:
    crawl = Crawl(NOWHERE, tmp_path, {**BAD_RATE, "LOG_FILE": "log"})
    assert crawl.finish() == 1
    (line,) = crawl.output.splitlines()
    assert line.startswith(MESSAGE)


_SCRIPT = """
import asyncio
import sys
from scrapy import Spider, crawler

class S(Spider):
    name = "s"

settings = {"DUPEFILTER_CLASS": "scrapy_bloom.BloomDupeFilter", "BLOOM_ERROR_RATE": "7"}
process = getattr(crawler, sys.argv[1])(settings)
crawl = process.crawl(S)
if len(sys.argv) > 2:  # the script waits for it itself
    crawl.addErrback(lambda failure: print(type(failure.value).__name__))
process.start()
sys.exit(process.bootstrap_failed)
"""


def test_an_error_is_the_last_line_of_a_script(tmp_path: Path) -> None:
    ran = run_script(_SCRIPT, "AsyncCrawlerProcess", cwd=tmp_path)
    assert "Traceback" not in ran.stderr
    assert MESSAGE in ran.stderr.splitlines()[-1]
    assert ran.returncode == 1


def test_a_script_gets_the_error_itself(tmp_path: Path) -> None:
    ran = run_script(_SCRIPT, "CrawlerProcess", "wait", cwd=tmp_path)
    assert ran.stdout == "SettingError\n"


def test_errors_of_others_are_logged_after_it(tmp_path: Path) -> None:
    later = 'from twisted.internet import defer; defer.fail(ValueError("of another"))\n'
    code = _SCRIPT.replace("process.start()\n", "process.start()\n" + later)
    ran = run_script(code, "CrawlerProcess", cwd=tmp_path)
    logged = ran.stderr.partition(MESSAGE)[2]
    assert logged.count("ValueError: of another") == 1


_OPEN_FAILS = """
import sys
from scrapy import Spider
from scrapy.crawler import CrawlerRunner
from scrapy.utils.reactor import install_reactor

install_reactor("twisted.internet.asyncioreactor.AsyncioSelectorReactor")
from twisted.internet import reactor
from twisted.internet.defer import inlineCallbacks
from scrapy_bloom import BloomDupeFilter

class Failing(BloomDupeFilter):
    def open(self):
        if self.opens:
            super().open()
        raise RuntimeError("cannot open")

class S(Spider):
    name = "s"
    start_urls = ["data:,"]

@inlineCallbacks
def crawls():
    runner = CrawlerRunner({"JOBDIR": "job", "SCHEDULER": sys.argv[1]})
    for df, opens in ((Failing, False), (Failing, True), (BloomDupeFilter, True)):
        Failing.opens, S.custom_settings = opens, {"DUPEFILTER_CLASS": df}
        try:
            yield runner.crawl(S)
        except RuntimeError as error:
            print(error)
        else:
            print("crawled")
    reactor.stop()

reactor.callWhenRunning(crawls)
reactor.run()
"""


@pytest.mark.parametrize("scheduler", ["scrapy.core.scheduler.Scheduler", SAFE["SCHEDULER"]])
def test_a_filter_that_cannot_be_opened_leaves_the_job_to_the_next_crawl(
    scheduler: str, tmp_path: Path
) -> None:
    ran = run_script(_OPEN_FAILS, scheduler, cwd=tmp_path)
    assert ran.stdout.splitlines() == ["cannot open", "cannot open", "crawled"], ran.stderr
