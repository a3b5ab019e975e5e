"""All commands on a running job that is killed again and again: no row is lost or doubled."""

import random
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from scrapy_bloom.queues.serialized import url_of
from scrapy_bloom.queues.sqlite_queue import SQLiteQueue
from scrapy_bloom.queues.store import State
from tests.support.cli import Ran, bloom
from tests.support.crawls import BLOOM, SPIDER, Crawl, spider_with, stat
from tests.support.sites import ScriptedSite

# It stays open until there is a file `end`.
CODE = """
from pathlib import Path
from scrapy import signals
from scrapy.exceptions import DontCloseSpider

make = LinkSpider.from_crawler.__func__

def stay_open(self):
    if not Path("end").exists():
        raise DontCloseSpider

def from_crawler(cls, crawler, *arguments, **options):
    spider = make(cls, crawler, *arguments, **options)
    crawler.signals.connect(spider.stay_open, signals.spider_idle)
    return spider

LinkSpider.stay_open, LinkSpider.from_crawler = stay_open, classmethod(from_crawler)
"""
SETTINGS = {
    "SCHEDULER": "scrapy_bloom.CrashSafeScheduler",
    "JOBDIR": "job",
    "RETRY_TIMES": 0,
}
# What is between @ is replaced by URLs of the number. Those of the last two commands stay as they
# are while a crawl uses the job.
COMMANDS = [
    *("add job @added@ @failing@", "queue job", "add job list --json", "info job --scan"),
    *("queue job --failed --json", "queue job --failed --requeue --yes", "check job list"),
    *("info job --json", "queue job --drop-host gone.example --yes"),
    *("report job -o page --overwrite", "copy job copy-@", "info job --format prometheus"),
    *("queue job --dead --drop --yes", "import imported job", "reset job"),
]
EVERY = 5  # commands, during one of which the crawl is killed


class Soak:
    """A job, and what was asked for."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.directory, self.dice = directory, random.Random(seed)
        self.site = ScriptedSite({"/": [tuple(f"/page/{number}" for number in range(60))]})
        self.added: set[str] = set()
        self.failing: set[str] = set()
        self.in_flight: Counter[str] = Counter()  # at kills
        self.spider = spider_with(directory, CODE, SPIDER)
        (directory / "imported").write_text(f"{self.site.url}imported\n")
        self.crawl = self.start()

    def start(self) -> Crawl:
        crawl = Crawl(self.site.url, self.directory, SETTINGS, spider=self.spider)
        crawl.wait_until(lambda: "Bloom filter in " in crawl.output)
        return crawl

    def run(self, commands: int) -> None:
        with ThreadPoolExecutor() as pool:
            for number in range(commands):
                ran = pool.submit(self.command, number)
                if number % EVERY == 0:
                    time.sleep(self.dice.random() / 2)
                    self.kill()
                self.check(ran.result(), COMMANDS[number % len(COMMANDS)])
                if not self.crawl.running():  # only now, because some commands lock the job
                    self.crawl = self.start()
        self.end()

    def command(self, number: int) -> Ran:
        url, name = self.site.url, f"{number:06}"
        listed = [f"/added/{name}-{part}" for part in range(20)]
        text = COMMANDS[number % len(COMMANDS)]
        if "list" in text and text.startswith("add"):
            (self.directory / "list").write_text("".join(f"{url[:-1]}{path}\n" for path in listed))
            self.added.update(listed)
        if "@added@" in text:
            self.added.add(f"/added/{name}")
            self.failing.add(f"/failing/{name}")
            self.site.answers[f"/failing/{name}"] = [503, ()]
        words = {
            "@added@": f"{url}added/{name}",
            "@failing@": f"{url}failing/{name}",
            "copy-@": f"copy-{name}",
        }
        arguments = [words.get(word, word) for word in text.split()]
        return bloom(*arguments, "-s", f"DUPEFILTER_CLASS={BLOOM}", cwd=self.directory)

    def check(self, ran: Ran, command: str) -> None:
        assert "Traceback" not in ran.err, (command, ran)
        assert "database is locked" not in ran.err + ran.out, (command, ran)
        assert "malformed" not in ran.err + ran.out, (command, ran)
        if command.startswith("add"):
            assert ran.status == 0, (command, ran)
        if ran.status:
            expected = "in use by", "handed over", "has no pending", "not recorded", "add --yes"
            assert any(why in ran.err + ran.out for why in expected), (command, ran)

    def kill(self) -> None:
        self.crawl.kill()
        self.site.settle()
        rows = SQLiteQueue(self.directory / "job/bloom.sqlite").requests(State.IN_FLIGHT)
        self.in_flight.update("/" + url_of(row.data).split("/", 3)[3] for row in rows)
        assert not (errors := self.crawl.our_lines("ERROR")), errors

    def end(self) -> None:
        (self.directory / "end").touch()
        assert self.crawl.finish() == 0
        bloom("queue", "job", "--requeue", "--yes", cwd=self.directory)
        last = Crawl.finished(self.site.url, self.directory, SETTINGS, spider=self.spider)
        assert not stat(last, "scheduler/failed")
        hits = self.site.hits
        lost = [path for path in self.added if not hits[path]]
        lost += [path for path in self.failing if hits[path] < 2]
        assert not lost
        usual = {"/": 0, **dict.fromkeys(self.failing, 2)}
        doubled = {
            path: number
            for path, number in hits.items()
            if path != "/" and number > usual.get(path, 1) + self.in_flight[path]
        }
        assert not doubled
        queue = bloom("queue", "job", "--json", cwd=self.directory).json
        assert not any(queue[name] for name in ("pending", "in_flight", "failed", "handed_over"))


def test_all_commands_on_a_running_job(tmp_path: Path) -> None:
    Soak(tmp_path, 1).run(len(COMMANDS) + 1)
