"""Nights of a crawl: a site is ill for some of them, then well, and no page is lost.

The site and what must hold at the end judge a store, not another store.
"""

import random
from collections import Counter, defaultdict
from functools import partial
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
    run_state_machine_as_test,
)

from scrapy_bloom.queues.store import (
    Batch,
    End,
    Ended,
    Joining,
    Reply,
    Row,
    State,
    Taken,
)
from tests.support.nights import Flight, Process, Site, Visit, visit_of
from tests.support.request_queues import key, page
from tests.support.stores import InFiles, InMemory, InRedis, Place

MOST_PAGES = 30
MOST_REDIRECTS = 4  # after so many, a visit has failed; Scrapy has REDIRECT_MAX_TIMES
WELL_NIGHTS = 6
SEEDS = st.integers(0, 2**32)


class InSlices(InMemory):
    """A store in memory that makes one row pending with each batch when a run has begun."""

    def __init__(self) -> None:
        super().__init__()
        self.job.slice_size = 1


PLACES: dict[str, type[Place]] = {
    "memory": InMemory,
    "slices": InSlices,
    "files": InFiles,
    "redis": InRedis,
}
EXAMPLES = {"memory": 400, "slices": 250, "files": 15, "redis": 8}


class Nights(RuleBasedStateMachine):
    """A site, a store, and what a crawl has done."""

    make: ClassVar[type[Place]] = InMemory
    workers: ClassVar[int] = 1

    def __init__(self) -> None:
        super().__init__()
        self.place = self.make()
        self.numbers = self.night = 0
        self.is_crawling = False
        self.good: set[int] = set()  # pages that have answered, or led to one that has
        self.wanted: set[int] = set()  # pages that were linked, or started from
        self.led_to: dict[int, set[int]] = defaultdict(set)  # pages that ended by redirects
        self.excused: set[int] = set()  # which led to a queued page, or were taken over
        self.redirected: dict[int, tuple[Visit, int]] = {}  # visits that may wait
        self.sessions: set[int] = set()  # visits that nothing but their own answers end
        self.starts: set[int] = set()  # the same of the last start()
        self.was_taken: set[int] = set()
        self.leftover: set[int] = set()  # hops that were taken over, or are pending from before
        self.old: list[Taken] = []  # of processes that died
        self.downloads: Counter[tuple[int, str]] = Counter()  # since the run began

    @initialize(size=st.integers(3, MOST_PAGES), seed=SEEDS)
    def begin(self, size: int, seed: int) -> None:
        self.site = Site(size, seed)

    @rule(is_named=st.sampled_from([True, True, False]), kills=st.integers(0, 3), seed=SEEDS)
    def ill_night(self, is_named: bool, kills: int, seed: int) -> None:
        outcomes = self.site.outcomes(random.Random(seed))
        self.crawl(outcomes, is_named=is_named, kills=kills, seed=seed)

    def teardown(self) -> None:
        if hasattr(self, "site") and not self.is_crawling:  # and nothing has gone wrong
            for night in range(WELL_NIGHTS):
                self.crawl({}, is_named=bool(night % 3), kills=0, seed=night)
            self.check_end()
        self.place.end()

    # A night.

    def crawl(
        self, outcomes: dict[int, str | int], *, is_named: bool, kills: int, seed: int
    ) -> None:
        self.is_crawling, self.night, self.dice = True, self.night + 1, random.Random(seed)
        self.outcomes: dict[int, str | int] = {**self.site.moved, **outcomes}
        self.cookies: set[int] = set()
        joining = Joining("shop", f"night {self.night}" if is_named else "")
        most = self.dice.choice([1, 3, 10])  # changes in a batch, about
        processes = self.open(joining)
        for _ in range(5000):
            if kills and self.dice.random() < 0.03:
                kills -= 1
                self.old = [each.taken for each in processes[0].flights if each.taken]
                self.place.die()
                for other in processes[1:]:
                    other.store.close()
                processes = self.open(joining)
            process = self.dice.choice(processes)
            for _ in range(min(len(process.flights), self.dice.randint(0, most))):
                index = self.dice.randrange(len(process.flights))
                self.answer(process, process.flights.pop(index))
            reply = self.apply(process, most)
            if reply.is_started and not (reply.left or process.batch.changes):
                break
        else:
            raise AssertionError("the night does not end")
        for each in processes:
            each.store.apply(Batch(is_over=True))
            each.store.close()
        self.check_night()
        self.is_crawling = False

    def open(self, joining: Joining) -> list[Process]:
        processes = [Process(self.place.open(joining))]
        if isinstance(self.place, InRedis):
            others = range(1, self.workers)
            processes += [Process(self.place.shared.open(joining)) for _ in others]
        if self.place.opened.began or self.place.opened.retried:
            self.downloads.clear()
            late = (State.FAILED, State.WAITING)
            rows = [row for row in self.rows().values() if row.state not in late]
            self.leftover = {url for row in rows for url in visit_of(row.data).urls[1:]}
        return processes

    def apply(self, process: Process, most: int) -> Reply:
        """Apply what a process has collected, and take requests."""
        batch, answers, facts = process.batch, process.answers, process.facts
        if process.runs_start and process.to_start:
            self.start(process, *process.to_start.pop(0))
        elif process.runs_start:
            batch.start_ended = True
        if self.old and self.dice.random() < 0.2:
            old = self.old.pop()
            process.enter(page("/old", replaces=old.id), self.refused)
            batch.ended.append(Ended(old.id, self.dice.choice([*End])))
        batch.want, batch.stands_still = self.dice.randint(1, most), not process.flights
        batch.may_start = process.runs_start is None
        process.batch, process.answers, process.facts = Batch(), [], []
        reply = process.store.apply(batch)
        for fact in facts:
            fact()
        for answer, is_queued in zip(answers, reply.queued, strict=True):
            answer(is_queued)
        self.judge_redirects()
        if process.runs_start is None and reply.runs_start:
            process.to_start, self.starts = [*self.site.starts], set()
        process.runs_start = reply.runs_start
        process.flights += [Flight(visit_of(each.data), each) for each in reply.taken]
        self.was_taken |= {visit_of(each.data).number for each in reply.taken}
        return reply

    def refused(self, is_queued: bool) -> None:
        assert not is_queued

    def start(self, process: Process, url: int, is_filtered: bool) -> None:
        visit = self.visit("once" if is_filtered else "start", url)
        process.facts.append(lambda: self.wanted.add(url))
        if not is_filtered:
            process.facts.append(lambda: self.starts.add(visit.number))
        process.enter(visit.entered(is_start=True))

    def visit(self, kind: str, url: int) -> Visit:
        self.numbers += 1
        return Visit(self.numbers, kind, (url,))

    # How requests end.

    def answer(self, process: Process, flight: Flight) -> None:
        """End a download as the site has it."""
        visit, taken = flight.visit, flight.taken
        outcome = self.outcomes.get(visit.url, "answers")
        if outcome == "wall":  # a redirect to itself, until the cookie is sent
            outcome = "answers" if visit.url in self.cookies else visit.url
            self.cookies.add(visit.url)
        if outcome == "retry":
            outcome = "answers" if visit.is_retry else "retry"
        if flight.parent:
            self.answer_in_memory(process, flight, flight.parent, outcome)
        elif outcome == "retry":
            process.enter(visit._replace(is_retry=True).entered(taken))
        elif isinstance(outcome, int) and len(visit.urls) <= MOST_REDIRECTS:
            new = visit._replace(urls=(*visit.urls, outcome), is_retry=False)
            process.facts.append(lambda: self.count(visit))
            may_wait = {visit.number: (visit, outcome)}
            process.enter(new.entered(taken), lambda q: q or self.redirected.update(may_wait))
        elif outcome == "errback" and visit.kind != "session":
            self.take_over(process, flight, self.visit("session", self.site.starts[0][0]))
        elif outcome == "answers":
            process.facts.append(lambda: self.good.update(visit.urls))
            process.facts.append(lambda: self.end_session(visit))
            if visit.kind != "session":
                self.follow(process, flight)
            if not flight.children:
                self.end(process, flight)
        else:
            self.end(process, flight, End.UNREADABLE if outcome == "unreadable" else End.FAILED)

    def end(self, process: Process, flight: Flight, end: End = End.DONE) -> None:
        assert flight.taken
        awaits = [key(f"/{url}") for url in flight.awaits]
        process.batch.ended.append(Ended(flight.taken.id, end, "503", awaits))
        if end is not End.UNREADABLE:
            process.facts.append(lambda: self.count(flight.visit))

    def end_session(self, visit: Visit) -> None:
        self.sessions.discard(visit.number)
        self.starts.discard(visit.number)

    def count(self, visit: Visit) -> None:
        """Check that a page is downloaded once in a run, unless a rule allows another time."""
        url, kind = visit.url, visit.kind
        self.downloads[url, kind] += 1
        allowed = 1 + (kind == "once" or (url, False) in self.site.starts) + (url in self.leftover)
        if kind in {"link", "once"}:
            assert self.downloads[url, kind] <= allowed, f"/{url} is downloaded again and again"

    def take_over(self, process: Process, flight: Flight, other: Visit) -> None:
        """An errback yields a request instead, which must be crawled."""
        process.enter(other.entered())
        self.end(process, flight, End.TAKEN_OVER)
        process.facts += [
            lambda: self.sessions.add(other.number),
            lambda: self.end_session(flight.visit),
            lambda: self.excused.add(flight.visit.urls[0]),
            lambda: self.leftover.update(flight.visit.urls[1:]),
        ]

    def follow(self, process: Process, flight: Flight) -> None:
        """A callback yields the links of a page."""
        for to, kind in self.site.links[flight.visit.url]:
            visit = self.visit("once" if kind == "link" and to in self.site.once else kind, to)
            if kind == "session":
                process.facts.append(partial(self.sessions.add, visit.number))
            elif process.store.knows(key(f"/{to}"), once=visit.kind == "once"):
                continue
            if kind == "memory":  # wanted when it is recorded; the page links it again
                flight.children += 1
                process.flights.append(Flight(visit, parent=flight))
                continue
            process.facts.append(partial(self.wanted.add, to))
            process.enter(visit.entered())

    def answer_in_memory(
        self, process: Process, flight: Flight, parent: Flight, outcome: str | int
    ) -> None:
        """A request in memory ends; the one that led to it waits for that."""
        url = flight.visit.url
        if isinstance(outcome, int) and outcome != url:

            def answer(is_queued: bool) -> None:
                """It has a row of its own now, or is a duplicate."""
                self.lead(flight.visit, outcome, self.rows())
                if not is_queued:
                    parent.awaits.append(outcome)
                self.end_child(process, flight, parent, is_done=is_queued)

            process.enter(self.visit("link", outcome).entered(), answer)
            return
        if outcome == "answers":
            process.facts.append(lambda: self.good.add(url))
        else:
            parent.has_failed = True
        self.end_child(process, flight, parent, is_done=outcome == "answers")

    def end_child(self, process: Process, flight: Flight, parent: Flight, *, is_done: bool) -> None:
        if is_done:
            process.batch.recorded.append(key(f"/{flight.visit.url}"))
        parent.children -= 1
        if not parent.children:
            self.end(process, parent, End.FAILED if parent.has_failed else End.DONE)

    # What must hold.

    def rows(self) -> dict[int, Row]:
        queue = self.place.queue()
        rows = [row for state in State for row in queue.requests(state)]
        return {visit_of(row.data).number: row for row in rows}

    def judge_redirects(self) -> None:
        """Find the visits that have ended because they were redirected to a page."""
        rows = self.rows() if self.redirected else {}
        for number, (visit, to) in [*self.redirected.items()]:
            if number not in rows:
                self.lead(visit, to, rows)
            if number not in rows or rows[number].state is not State.WAITING:
                del self.redirected[number]

    def lead(self, visit: Visit, to: int, rows: dict[int, Row]) -> None:
        """Note that the pages of a visit have ended because they led to another page."""
        for url in visit.urls:
            self.led_to[url].add(to)
        queued = [n for n, row in rows.items() if row.page == key(f"/{to}")]
        if any(n not in self.was_taken and rows[n].state is not State.WAITING for n in queued):
            self.excused.update(visit.urls)

    def check_night(self) -> None:
        rows = self.rows()
        lost = (self.sessions | self.starts) - {*rows}
        assert not lost, "requests that are not filtered are lost"
        leftover = {key(f"/{url}") for url in self.leftover}
        for row in rows.values():
            others = {page for other in rows.values() if other is not row for page in other.pages}
            assert row.waits_for in {b""} | leftover | others, "a row waits for nothing"

    def check_end(self) -> None:
        rows = self.rows()
        left = {row.state for row in rows.values()}
        assert left <= {State.DEAD}, "something is left after the well nights"
        known = self.good | self.excused
        known |= {url for row in rows.values() for url in visit_of(row.data).urls}
        while more := {url for url, to in self.led_to.items() if to & known} - known:
            known |= more
        store = self.place.open()
        recorded = {url for url in range(MOST_PAGES) if store.knows(key(f"/{url}"))}
        self.place.close()
        assert self.wanted | recorded <= known, "pages are lost"


@pytest.mark.parametrize("factor", [1, pytest.param(20, marks=pytest.mark.soak)])
@pytest.mark.parametrize("place", PLACES)
def test_no_page_is_lost(place: str, factor: int) -> None:
    class Here(Nights):
        make = PLACES[place]

    most = factor * EXAMPLES[place]
    run_state_machine_as_test(Here, settings=settings(max_examples=most, stateful_step_count=6))
