"""A kill before and after each statement: what is recorded is queued or done, and known."""

import logging
import pickle
import random
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from queuelib import LifoDiskQueue
from scrapy import Request, Spider
from scrapy.utils.test import get_crawler

from scrapy_bloom.crawl.dupefilter import BloomDupeFilter
from scrapy_bloom.crawl.scheduler.takeover import open_with_scrapys_queue
from scrapy_bloom.job import jobdir
from scrapy_bloom.job.filter import LocalBackend
from scrapy_bloom.queues.sqlite_store import SQLiteStore
from scrapy_bloom.queues.store import Batch, Ended, Joining, State
from tests.support.backends import local_backend
from tests.support.boundaries import dies
from tests.support.request_queues import begun, enter, key, page
from tests.support.stores import IN_MEMORY, InFiles

WINDOW = 100.0
EVERY = 25  # only so many steps, unless all are asked for


class Job:
    """A job, and what its processes have done."""

    def __init__(self, directory: Path) -> None:
        options = {"capacity": 12, "least_new": 20}  # grows three times
        self.place = InFiles(directory / "job", window_secs=WINDOW, **options)
        self.directory = self.place.job
        self._notes = directory / "notes"
        self._notes.touch()

    def note(self, verb: str, names: Iterable[str]) -> None:
        with self._notes.open("ab", buffering=0) as file:  # a kill loses nothing of it
            file.write(f"{verb} {' '.join(names)}\n".encode())

    def noted(self, verb: str) -> set[str]:
        lines = map(str.split, self._notes.read_text().splitlines())
        return {name for first, *names in lines if first == verb for name in names}

    def compare(self, knows: Callable[[bytes], bool], queued: Iterable[bytes]) -> set[str]:
        """Compare a filter with a queue, and with what was done; return what is known."""
        lost = self.noted("lost")  # by design
        names = {key(name): name for name in self.noted("began")}
        in_queue = {names[entry] for entry in queued}
        known = {name for each_name, name in names.items() if knows(each_name)}
        assert self.noted("stored") <= known | lost, "false negatives"
        assert in_queue <= known | lost, "queued, but not recorded"
        assert known <= in_queue | self.noted("ended"), "recorded, but neither queued nor done"
        return known


class Safe(Job):
    """With its queue in the same file."""

    def crawl(self, first: int, number: int, run: str = "") -> None:
        """Store batches: each has five pages, of which some are done later."""
        store = self.open(run)
        in_flight: list[Any] = []
        for batch in range(first, first + number):
            names = [f"{batch}-{n}" for n in range(5)]
            ended, in_flight = in_flight[:2], in_flight[2:]
            self.note("ended", [taken.data.decode() for taken in ended])
            self.note("began", names)
            entered = [page(name, data=name.encode()) for name in names]
            ends = [Ended(taken.id) for taken in ended]
            in_flight += store.apply(Batch(entered, ended=ends, want=3)).taken
            self.note("stored", names)
            if batch % 3 == 1:
                store._database.file._sync_all()  # as its thread does

    def open(self, run: str = "") -> SQLiteStore:
        store = self.place.open(Joining("shop", run))
        assert isinstance(store, SQLiteStore)
        return store

    def crawl_and_close(self, first: int, number: int, run: str = "") -> None:
        self.crawl(first, number, run)
        self.place.close()

    def drop(self) -> None:
        """Drop requests with a command."""
        self.note("ended", self.noted("began"))
        self.place.queue().move(State.PENDING, None)

    def crawl_nights(self) -> None:
        for night in range(1, 6):
            self.note("lost", (name for name in self.noted("began") if name < f"{night - 2}"))
            self.crawl_and_close(10 * night, 2, f"night {night}")
            self.place.age(0.4 * WINDOW)

    def copy(self) -> None:
        """Put a copy of the running job in its place; it starts over with the rows."""
        copy = self.place.path.with_suffix(".copy")
        shutil.copy(self.place.path, copy)
        copy.replace(self.place.path)
        for verb in ("ended", "lost"):
            self.note(verb, self.noted("began"))

    def record_without(self) -> None:
        """Queue pages without a filter, and have Scrapy's own filter record others."""
        store = begun(self.place.path)
        names = [[f"{place}-{n}" for n in range(20)] for place in ("queue", "seen")]
        enter(store, *(page(name, data=name.encode()) for name in names[0]))
        store.close()
        seen = b"".join(key(name).hex().encode() + b"\n" for name in names[1])
        (self.directory / jobdir.SEEN).write_bytes(seen)
        for verb in ("began", "stored"):
            self.note(verb, names[0] + names[1])
        self.note("ended", names[1])

    def check(self) -> None:
        store = self.open()
        queue = self.place.queue()
        queued = [row.page for state in State for row in queue.requests(state) if row.page]
        assert len(queued) == len(set(queued))
        known = self.compare(store.knows, queued)
        if not self.noted("lost"):
            assert len(known - self.noted("stored")) in (0, 5), "half of a batch"
            assert store._backend
            assert sum(entry.count for entry in store._backend.live) == len(known)
        self.place.close()


class TakenOver(Safe):
    """It was paused under Scrapy's scheduler, and is taken over."""

    def leave(self) -> None:
        UnderScrapy(self.directory.parent).crawl_and_close(0, 6)

    def leave_killed(self) -> None:
        job = UnderScrapy(self.directory.parent)
        job.crawl_and_close(0, 3)
        job.crawl(3, 3)  # with an outdated active.json

    def open(self, run: str = "") -> SQLiteStore:
        queue = "scrapy.pqueues.ScrapyPriorityQueue"  # the other one asks a downloader
        crawler = get_crawler(Spider, {"SCHEDULER_PRIORITY_QUEUE": queue})
        crawler.spider = crawler._create_spider("shop")

        class Fingerprinter:
            def fingerprint(self, request: Request) -> bytes:
                return key(request.url.rpartition("/")[2])

        crawler.request_fingerprinter = Fingerprinter()
        store = self.place.store = self.place.make()
        df = BloomDupeFilter.from_crawler(crawler)
        open_with_scrapys_queue(crawler, df, self.directory, store, Joining("shop", run))
        return store


class UnderScrapy(Job):
    """Under Scrapy's scheduler: after a kill, it starts over."""

    def crawl(self, first: int, number: int) -> LocalBackend:
        queue = self.directory / jobdir.QUEUE
        backend = self.open()
        backend.begin()
        queue.mkdir(exist_ok=True)
        pushed = LifoDiskQueue(queue / "0")
        for batch in range(first, first + number):
            names = [f"{batch}-{n}" for n in range(5)]
            self.note("began", names)
            for name in names:
                backend.add(key(name))
                pushed.push(pickle.dumps(Request(f"https://shop.example/{name}").to_dict()))
            self.note("stored", names)
            if batch % 3 == 1:
                backend._file._sync_all()  # as its thread does
        pushed.close()
        return backend

    def open(self) -> LocalBackend:
        backend = self.place.make()._backend
        assert backend
        backend.open()
        if not (self.directory / jobdir.QUEUE / "0").exists():
            self.note("lost", self.noted("began"))
        return backend

    def crawl_and_close(self, first: int, number: int) -> None:
        backend = self.crawl(first, number)
        (self.directory / jobdir.QUEUE / "active.json").write_text("[0]")
        backend.close()

    def check(self) -> None:
        backend = self.open()
        in_queue = self.noted("began") - self.noted("lost") - self.noted("ended")
        self.compare(backend.__contains__, map(key, in_queue & self.noted("stored")))
        backend.close()

    def record_by_command(self) -> None:
        """Record pages that need not be crawled; the crawl continues afterwards."""
        backend = local_backend(self.directory, **self.place.options, is_crawl=False)
        names = [f"page-{n}" for n in range(20)]
        for verb in ("began", "ended"):
            self.note(verb, names)
        backend.open()
        backend.add_many(list(map(key, names)))
        backend._file._sync_all()
        backend.close()
        self.note("stored", names)


def safe(first: int, number: int) -> Callable[[Any], object]:
    return lambda job: job.crawl(first, number)


def whole(first: int, number: int) -> Callable[[Any], object]:
    return lambda job: job.crawl_and_close(first, number)


STORIES: dict[str, tuple[type[Any], list[Callable[[Any], object]]]] = {
    "a whole crawl": (Safe, [whole(0, 8)]),
    "recovery": (Safe, [safe(0, 7), safe(7, 2)]),
    "recovery and a close": (Safe, [safe(0, 7), whole(7, 0)]),
    "windows": (Safe, [Safe.crawl_nights]),
    "a command after a close": (Safe, [whole(0, 4), Safe.drop]),
    "a command after a kill": (Safe, [safe(0, 4), Safe.drop]),
    "a copy": (Safe, [safe(0, 4), Safe.copy, safe(4, 1)]),
    "what was recorded before": (Safe, [Safe.record_without, safe(0, 1)]),
    "a takeover": (TakenOver, [TakenOver.leave, whole(6, 1)]),
    "a takeover after a kill": (TakenOver, [TakenOver.leave_killed, whole(6, 1)]),
    "a command under Scrapy's scheduler": (
        UnderScrapy,
        [whole(0, 4), UnderScrapy.record_by_command],
    ),
    "under Scrapy's scheduler": (UnderScrapy, [whole(0, 5)]),
    "again under Scrapy's scheduler": (UnderScrapy, [whole(0, 5), whole(5, 4)]),
    "after a kill under Scrapy's scheduler": (UnderScrapy, [safe(0, 5), whole(5, 2)]),
}

BREAKS = ("a copy", "a takeover after a kill")  # after which a crawl starts over


@pytest.mark.parametrize("every", [EVERY, pytest.param(1, marks=pytest.mark.soak)])
@pytest.mark.parametrize("name", STORIES)
@pytest.mark.usefixtures("reactor")
def test_a_kill_at_a_boundary(name: str, every: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    kind, (*earlier, last) = STORIES[name]
    step, has_died = random.randrange(every) + 1, True
    while has_died:
        with tempfile.TemporaryDirectory(dir=IN_MEMORY) as directory:
            job = kind(Path(directory))
            caplog.clear()
            for process in earlier:
                dies(lambda: process(job))  # noqa: B023 - it is over before the next one
            has_died = dies(lambda: last(job), step)  # noqa: B023
            try:
                job.check()
            except Exception as error:
                raise AssertionError(f"a kill at step {step}: {error}") from error
            starts_over = name in BREAKS or (
                has_died and kind is UnderScrapy and "command" not in name
            )
            assert starts_over or not caplog.records, step
        step += every
    assert step > 30
