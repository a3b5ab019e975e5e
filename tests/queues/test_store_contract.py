"""The rules of `scrapy_bloom.queues.store`, for every store, and for one in memory."""

import itertools
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from scrapy_bloom.exceptions import BloomError
from scrapy_bloom.queues.serialized import serialized
from scrapy_bloom.queues.store import (
    LINKED,
    MOST_TRIES,
    Batch,
    End,
    Ended,
    Entered,
    Fate,
    Joining,
    State,
    Store,
    Taken,
)
from tests.support.crawls import ROOT
from tests.support.request_queues import (
    SHOP,
    done,
    enter,
    failed,
    name_of,
    names,
    page,
    push,
    request,
    take,
    taken,
    unreadable,
)
from tests.support.stores import InFiles, InMemory, InRedis, Place

PLACES: dict[str, type[Place]] = {"memory": InMemory, "files": InFiles, "redis": InRedis}
SLOTS = ["", "\0", "a\0b", "a", "b.example", "\ud800", "ÿ", "\U0010ffff", "\x01", "x" * 10_000]


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    place = PLACES[request.param]()
    yield place
    place.end()


@pytest.fixture
def store(place: Place) -> Iterator[Store]:
    yield place.open()
    place.close()


def numbers(place: Place) -> dict[str, int]:
    """The numbers of requests in each state, without states that have none."""
    assert place.store.counts() == place.queue().counts()
    return {state.value: number for state, number in place.store.counts().items() if number}


def next_run(place: Place, name: str = "", **options: bool) -> Store:
    """Close the store, and open it for the next run, or for the same one."""
    place.close()
    return place.open(replace(SHOP, run=name), **options)


def fail_again(place: Place, first: Entered, reason: str = "503") -> None:
    """Take the only request, and end it as failed."""
    failed(place.store, taken(place.store), first, reason)


class TestOrder:
    def test_priorities_ranks_and_positions(self, store: Store) -> None:
        push(store, "start 1", rank=1, newest_first=False)
        push(store, "start 2", rank=1, newest_first=False)
        for name in ("old", "new"):
            push(store, name)
        push(store, "before all others", rank=-128)
        push(store, "after all others", rank=127)
        push(store, "urgent", priority=5)
        push(store, "late", priority=-5)
        order = ["urgent", "before all others", "new", "old", "start 1", "start 2"]
        assert names(store, 9) == [*order, "after all others", "late"]

    def test_priorities_beyond_64_bits(self, store: Store) -> None:
        for priority in (-(2**70), 0, 2**70):
            push(store, str(priority), priority=priority)
        push(store, "least", priority=-(2**63) + 2)
        push(store, "most", priority=2**63 - 2)
        assert names(store, 5) == [str(2**70), "most", "0", "least", str(-(2**70))]

    def test_slots_are_served_round_robin(self, place: Place) -> None:
        """The next slot in the order of names that has the fewest downloads."""
        store = place.open(by_slot=True)
        for number, slot in itertools.product(range(3), "abc"):
            push(store, f"{slot}{number}", slot=slot, newest_first=False)
        downloads: Counter[str] = Counter()
        order = []
        for _ in range(6):
            found = take(store, downloads)
            assert found
            assert found.slot == name_of(found)[0]
            order.append(name_of(found))
            downloads[found.slot] += 1
        assert order == ["a0", "b0", "c0", "a1", "b1", "c1"]
        downloads.update(a=5, b=1, c=1)
        found = take(store, downloads)
        assert found
        assert name_of(found) == "b2"  # after c comes a, but that is busy
        place.close()

    def test_several_at_once_are_those_that_are_taken_one_by_one(self, place: Place) -> None:
        store = place.open(by_slot=True)
        for number, slot in itertools.product(range(3), "abc"):
            push(store, f"{slot}{number}", slot=slot, newest_first=False)
        reply = store.apply(Batch(want=5, downloads={"b": 1}))
        assert [name_of(each) for each in reply.taken] == ["a0", "c0", "a1", "b0", "c1"]
        assert (reply.pending, store.pending, reply.left) == (4, 4, 9)
        reply = store.apply(Batch(want=9))
        assert len(reply.taken) == 4
        place.close()

    def test_slots_of_any_name(self, place: Place) -> None:
        store = place.open(by_slot=True)
        for number, slot in itertools.product(range(2), SLOTS):
            push(store, f"{slot} {number}", slot=slot, newest_first=False)
        turns = [names(store, len(SLOTS)) for _ in range(2)]
        expected = [sorted(f"{slot} {number}" for slot in SLOTS) for number in range(2)]
        assert [*map(sorted, turns)] == expected
        assert take(store) is None
        place.close()

    def test_many_slots(self, place: Place) -> None:
        store = place.open(by_slot=True)
        slots, at_once = 3000, 500
        for start in range(0, 2 * slots, at_once):
            numbers = range(start, start + at_once)
            enter(
                store,
                *(request(str(n), slot=f"{n % slots}.org", newest_first=False) for n in numbers),
            )
        first = {int(name) for name in names(store, 100)}
        assert len(first) == 100
        assert max(first) < slots  # of as many slots
        place.close()

    def test_requests_return_to_their_place(self, place: Place) -> None:
        store = place.open()
        for name in "abc":
            push(store, name, newest_first=False)
        assert names(store, 2) == ["a", "b"]
        place.close()
        store = place.open()
        assert place.opened.killed == 0
        assert names(store, 3) == ["a", "b", "c"]
        place.close()


class TestAnswers:
    def test_new_known_and_in_one_batch(self, store: Store) -> None:
        assert enter(store, page("a"), page("b"), page("a")) == [True, True, False]
        assert enter(store, page("b"), page("c")) == [False, True]
        assert store.pending == 3

    def test_requests_without_a_fingerprint_are_not_filtered(self, store: Store) -> None:
        assert enter(store, request("a"), request("a")) == [True, True]
        assert not store.apply(Batch()).queued

    def test_not_filtered_but_recorded(self, store: Store) -> None:
        unfiltered = page("a", is_filtered=False)
        assert enter(store, unfiltered, unfiltered, page("a")) == [True, True, False]
        assert enter(store, unfiltered) == [True]

    def test_filtered_but_not_recorded(self, store: Store) -> None:
        unrecorded = page("a", is_recorded=False)
        assert enter(store, unrecorded, unrecorded) == [True, True]
        assert enter(store, page("a"), unrecorded) == [True, False]
        assert enter(store, page("a")) == [False]

    def test_recorded_without_a_request(self, store: Store) -> None:
        new = page("a")
        assert new.fingerprint
        assert not store.knows(new.fingerprint)
        store.apply(Batch(recorded=[new.fingerprint, new.fingerprint]))
        assert store.knows(new.fingerprint)
        assert enter(store, new) == [False]
        assert store.pending == 0

    def test_recorded_after_the_requests_of_the_batch(self, store: Store) -> None:
        new = page("a")
        assert new.fingerprint
        assert store.apply(Batch([new], recorded=[new.fingerprint])).queued == [True]

    def test_known_in_the_next_process(self, place: Place) -> None:
        store = place.open()
        enter(store, page("a"))
        place.close()
        store = place.open()
        assert enter(store, page("a"), page("b")) == [False, True]
        place.die()
        assert enter(place.open(), page("a"), page("b")) == [False, False]
        place.close()

    def test_once_in_each_run(self, place: Place) -> None:
        store = place.open()
        start = page("start", once=True)
        assert start.fingerprint
        assert enter(store, start, start) == [True, False]
        assert store.knows(start.fingerprint)
        assert store.knows(start.fingerprint, once=True)
        assert enter(store, start, page("start")) == [False, False]
        done(store, taken(store))
        store = next_run(place)  # joins the same run
        assert enter(store, start) == [False]
        store = next_run(place, "2")
        assert not store.knows(start.fingerprint, once=True)
        assert enter(store, page("start"), start, start) == [False, True, False]
        assert store.pending == 1
        place.close()

    def test_once_for_a_known_page(self, store: Store) -> None:
        """It was not yielded by start() before in this run."""
        assert enter(store, page("a"), page("a", once=True)) == [True, True]
        assert enter(store, page("a", once=True)) == [False]

    def test_once_and_not_filtered(self, store: Store) -> None:
        start = page("start", once=True, is_filtered=False)
        assert enter(store, start, start) == [True, True]
        assert enter(store, page("start", once=True), page("start")) == [False, False]

    def test_once_and_not_recorded(self, store: Store) -> None:
        start = page("start", once=True, is_recorded=False)
        assert enter(store, start, start, page("start")) == [True, True, True]

    def test_in_the_order_of_the_batch(self, store: Store) -> None:
        requests = [page(str(number % 7), newest_first=False) for number in range(20)]
        assert enter(store, *requests) == [True] * 7 + [False] * 13
        assert names(store, 10) == [str(number) for number in range(7)]


class TestEnds:
    def test_done(self, place: Place, store: Store) -> None:
        enter(store, page("a"), page("b"))
        first, second = taken(store), taken(store)
        assert numbers(place) == {"in_flight": 2}
        reply = done(store, first)
        assert (reply.left, reply.pending, reply.counters) == (1, 0, (2, 1))
        assert done(store, second).left == 0
        assert numbers(place) == {}
        assert enter(store, page("a")) == [False]

    def test_in_one_step_with_the_requests_it_led_to(self, place: Place, store: Store) -> None:
        push(store, "parent")
        parent = taken(store)
        children = [request(name, newest_first=False) for name in "abc"]
        reply = store.apply(Batch(children, ended=[Ended(parent.id)], want=1))
        assert [name_of(each) for each in reply.taken] == ["a"]
        assert (reply.pending, reply.left, reply.counters) == (2, 3, (4, 1))
        assert numbers(place) == {"pending": 2, "in_flight": 1}

    def test_twice_counts_once(self, place: Place, store: Store) -> None:
        push(store, "a")
        push(store, "b")
        first = taken(store)
        for _ in range(2):
            assert done(store, first, first).counters == (2, 1)
        assert numbers(place) == {"pending": 1}

    @pytest.mark.parametrize("end", End)
    def test_requests_that_are_not_in_flight_have_no_end(
        self, end: End, place: Place, store: Store
    ) -> None:
        enter(store, page("a"))
        first = taken(store)
        done(store, first)
        ended = Ended(first.id, end, [b"via" * 7], page("a"), 0, "503")
        reply = store.apply(Batch(ended=[ended], asked=[b"via" * 7]))
        assert reply.fates == {b"via" * 7: Fate.OTHER}
        assert numbers(place) == {}
        assert reply.counters == (1, 1)

    def test_unreadable_requests_are_for_a_later_process(self, place: Place) -> None:
        store = place.open()
        push(store, "gone callback")
        push(store, "other")
        done(store, taken(store))
        unreadable(store, taken(store))
        assert numbers(place) == {"unreadable": 1}
        assert take(store) is None
        assert store.apply(Batch()).left == 0
        place.close()
        assert place.queue().counts()[State.UNREADABLE] == 1
        store = place.open()
        assert numbers(place) == {"pending": 1}
        assert names(store, 2) == ["gone callback"]
        place.die()
        unreadable(place.open(), taken(place.store))
        place.die()
        assert names(place.open(), 2) == ["gone callback"]
        place.close()

    def test_large_requests(self, place: Place) -> None:
        store = place.open(by_slot=True)
        sizes = [0, 1, 2**16, 2**24]
        for size in sizes:
            data = bytes(range(256)) * (size // 256) + bytes(size % 256)
            enter(store, Entered(data, slot="a", newest_first=False))
        for size in sizes:
            found = taken(store)
            assert len(found.data) == size
            assert found.data[:256] == bytes(range(256))[:size]
            done(store, found)
        assert take(store) is None
        place.close()


class TestFailed:
    def test_it_is_kept_as_it_first_entered(self, place: Place, store: Store) -> None:
        first = page("page", slot="a", priority=3, rank=1, newest_first=False)
        enter(store, first)
        retry = page("page", slot="b", priority=2, is_filtered=False)
        store.apply(Batch([retry], ended=[Ended(taken(store).id, End.REPLACED)]))
        reply = failed(store, taken(store), first, "503")
        assert numbers(place) == {"failed": 1}
        assert (reply.left, reply.pending, reply.counters) == (0, 0, (2, 1))
        (kept,) = place.queue().requests(State.FAILED)
        assert (kept.data, kept.state, kept.slot) == (first.data, State.FAILED, "a")
        assert (kept.priority, kept.rank, kept.tries, kept.reason) == (3, 1, 0, "503")
        assert kept.fingerprint == first.fingerprint
        assert take(store) is None
        assert enter(store, page("page")) == [False]

    def test_it_is_tried_again_in_the_next_run(self, place: Place) -> None:
        store = place.open()
        first = page("page", slot="a", priority=3)
        enter(store, first, page("other"))
        failed(store, taken(store), first)
        store = next_run(place, "2")
        assert (place.opened.retried, place.opened.counts[State.FAILED]) == (1, 1)
        reply = store.apply(Batch())
        assert (reply.pending, reply.left, reply.given_up) == (2, 2, 0)
        assert numbers(place) == {"pending": 2}
        again = taken(store)
        assert (again.data, again.slot, again.tries) == (first.data, "a", 1)
        assert taken(store).tries == 0
        place.close()

    def test_a_resumed_run_does_not_try_it_again_while_others_are_left(self, place: Place) -> None:
        store = place.open()
        enter(store, page("page"), page("other"))
        failed(store, taken(store), page("page"))
        store = next_run(place)
        assert place.opened.retried == 0
        assert len(names(store, 5)) == 1
        assert numbers(place) == {"in_flight": 1, "failed": 1}
        place.close()

    def test_a_store_with_nothing_but_failed_requests_tries_them_again(self, place: Place) -> None:
        store = place.open()
        enter(store, page("page"))
        store.apply(Batch(may_start=True))
        store.apply(Batch(start_ended=True))
        failed(store, taken(store), page("page"))
        assert take(store) is None
        store = next_run(place)
        assert (place.opened.began, place.opened.retried) == (False, 1)
        assert taken(store).tries == 1
        place.close()

    def test_a_run_that_is_joined_by_its_name_does_not_try_it_again(self, place: Place) -> None:
        """Or workers that are late on one night would use up its five tries."""
        store = place.open(replace(SHOP, run="monday"))
        enter(store, page("page"))
        store.apply(Batch(may_start=True))
        store.apply(Batch(start_ended=True))
        failed(store, taken(store), page("page"))
        assert take(store) is None
        store = next_run(place, "monday")
        assert place.opened.retried == 0
        assert take(store) is None
        assert numbers(place) == {"failed": 1}
        store = next_run(place)
        assert taken(store).tries == 1
        place.close()

    def test_it_is_dead_after_five_runs(self, place: Place) -> None:
        store = place.open()
        enter(store, page("page"))
        for run in range(MOST_TRIES):
            assert numbers(place) == {"pending": 1}, run
            fail_again(place, page("page"), f"reason {run}")
            store = next_run(place, f"run {run + 2}")
            if run + 1 < MOST_TRIES:
                assert place.opened.retried == 1
            reply = store.apply(Batch())
            assert reply.given_up == (run + 1 == MOST_TRIES)
        assert (reply.left, reply.pending, reply.died) == (0, 0, [])
        assert numbers(place) == {"dead": 1}
        (dead,) = place.queue().requests(State.DEAD)
        assert (dead.tries, dead.reason, dead.deaths) == (MOST_TRIES, "reason 4", 0)
        store = next_run(place, "last")
        assert take(store) is None
        place.close()

    def test_there_is_one_of_a_fingerprint(self, place: Place, store: Store) -> None:
        for reason in ("503", "timeout"):
            enter(store, page("page", is_filtered=False))
            fail_again(place, page("page"), reason)
        assert numbers(place) == {"failed": 1}
        (kept,) = place.queue().requests(State.FAILED)
        assert kept.reason == "timeout"
        assert store.apply(Batch()).counters == (2, 1)

    def test_a_dead_one_stays_dead_when_another_fails(self, place: Place) -> None:
        place.open()
        enter(place.store, page("page"))
        for run in range(MOST_TRIES):
            fail_again(place, page("page"))
            next_run(place, str(run)).apply(Batch())
        assert enter(place.store, page("page", is_filtered=False)) == [True]
        fail_again(place, page("page"), "new reason")
        assert numbers(place) == {"dead": 1}
        (dead,) = place.queue().requests(State.DEAD)
        assert (dead.tries, dead.reason) == (MOST_TRIES, "new reason")
        place.close()

    def test_a_start_request_that_always_fails(self, place: Place) -> None:
        """It is one request in each run, and one row."""
        start = page("start", once=True)
        place.open()
        for run in range(2 * MOST_TRIES):
            assert enter(place.store, start, start) == [True, False]
            found = taken(place.store)
            assert found.tries == min(run, MOST_TRIES)
            assert take(place.store) is None
            failed(place.store, found, start)
            assert numbers(place) == {"failed" if run < MOST_TRIES else "dead": 1}
            next_run(place, str(run))
        place.close()

    def test_a_start_request_of_a_page_that_is_tried_again_already(self, place: Place) -> None:
        store = place.open()
        enter(store, page("start", once=True))
        fail_again(place, page("start"))
        store = next_run(place, "2")
        store.apply(Batch())
        assert numbers(place) == {"pending": 1}
        assert enter(store, page("start", once=True)) == [False]
        fail_again(place, page("start"))
        assert enter(store, page("start", once=True)) == [False]
        place.close()

    def test_many_are_tried_again(self, place: Place) -> None:
        """Some with each batch; the crawl is not over before that."""
        number = 1200
        store = place.open()
        pages = [page(str(each)) for each in range(number)]
        for start in range(0, number, 40):
            some = pages[start : start + 40]
            enter(store, *some)
            for _ in some:
                found = taken(store)
                failed(store, found, pages[int(name_of(found))])
        store = next_run(place, "2")
        assert place.opened.retried == number
        batches, reply = 0, store.apply(Batch())
        while reply.pending < number:
            assert reply.left == number
            assert batches < number
            batches, reply = batches + 1, store.apply(Batch())
        if not isinstance(place, InMemory):
            assert batches
        assert numbers(place) == {"pending": number}
        place.close()


class TestTargets:
    """What has become of a page, for redirects to it that the filter drops."""

    VIA = (b"1" * 20, b"2" * 20)

    def fates(self, store: Store) -> list[Fate]:
        fates = store.apply(Batch(asked=self.VIA)).fates
        return [fates[each] for each in self.VIA]

    def test_a_page_is_unfinished_until_what_took_its_place_is_done(self, store: Store) -> None:
        one, other = self.VIA
        assert self.fates(store) == [Fate.OTHER, Fate.OTHER]
        enter(store, page("page"))
        replaced = Ended(taken(store).id, End.REPLACED, [one])
        store.apply(Batch([request("retry", via=[one])], ended=[replaced]))
        assert self.fates(store) == [Fate.UNFINISHED, Fate.OTHER]
        replaced = Ended(taken(store).id, End.REPLACED, [one, other])
        reply = store.apply(
            Batch([request("redirect", via=self.VIA)], ended=[replaced], asked=self.VIA)
        )
        assert [*reply.fates.values()] == [Fate.UNFINISHED, Fate.UNFINISHED]
        store.apply(Batch(ended=[Ended(taken(store).id, End.DONE, self.VIA)]))
        assert self.fates(store) == [Fate.OTHER, Fate.OTHER]

    def test_a_redirect_is_new_unless_its_page_is_unfinished_or_has_failed(
        self, place: Place
    ) -> None:
        """It is recorded only when it is done, and a failed page is new in the next run."""
        store, (one, other) = place.open(), self.VIA
        enter(store, page("first"))
        first = taken(store)
        target = Entered(b"target", b"t" * 20, is_recorded=False, via=[one, b"t" * 20])
        again = target._replace(via=[other, b"t" * 20])
        assert enter(store, target, again) == [True, False]
        redirected = taken(store)
        assert enter(store, again) == [False]
        failed(store, redirected, page("first"), via=target.via)
        assert enter(store, again) == [False]
        assert store.apply(Batch(asked=[b"t" * 20])).fates == {b"t" * 20: Fate.FAILED}
        done(store, first)
        store = next_run(place, "2")
        assert name_of(taken(store)) == "first"
        assert enter(store, again, target) == [True, False]
        store.apply(Batch(recorded=again.via, ended=[Ended(taken(store).id, via=again.via)]))
        assert enter(store, target) == [False]  # it is recorded
        assert store.apply(Batch(asked=again.via)).fates == dict.fromkeys(again.via, Fate.OTHER)
        place.close()

    def test_a_link_to_the_page_of_a_redirect_is_kept_until_the_page_is_done(
        self, place: Place
    ) -> None:
        """It is a duplicate, but if the redirect fails, nothing else may lead to the page."""
        for run, fails in enumerate((False, True)):
            own = bytes([run]) * 20
            link = Entered(serialized({"name": "link"}), own)
            store = next_run(place, str(run)) if run else place.open()
            target = Entered(
                serialized({"name": "target"}), own, is_recorded=False, via=[self.VIA[run], own]
            )
            enter(store, page(f"first {run}"))
            first = taken(store)
            reply = store.apply(Batch([target], ended=[Ended(first.id, End.REPLACED)]))
            assert reply.queued == [True]
            redirected = taken(store)
            assert enter(store, link, link) == [False, False]
            assert numbers(place) == {"in_flight": 1, "failed": 1}
            if not fails:
                store.apply(Batch(ended=[Ended(redirected.id, via=target.via)]))
                assert numbers(place) == {}
                continue
            failed(store, redirected, page(f"first {run}"), via=target.via)
            assert enter(store, link) == [False]
            assert numbers(place) == {"failed": 2}
        reasons = {each.reason for each in place.queue().requests(State.FAILED)}
        assert LINKED in reasons
        store = next_run(place, "last")
        requests = [taken(store), taken(store)]
        assert {name_of(each) for each in requests} == {"first 1", "link"}
        done(store, *requests)
        assert enter(store, link) == [False]  # it is recorded since it was kept
        place.close()

    def test_a_link_to_a_page_to_which_a_redirect_has_failed(self, place: Place) -> None:
        store, own = place.open(), b"t" * 20
        enter(store, page("first"))
        failed(store, taken(store), page("first"), via=[own])
        link = Entered(serialized({"name": "link"}), own)
        assert enter(store, link, link) == [False, False]
        assert numbers(place) == {"failed": 2}
        place.close()

    def test_a_request_that_is_not_queued_changes_nothing(self, store: Store) -> None:
        enter(store, page("page"))
        assert enter(store, page("page", via=self.VIA)) == [False]
        assert self.fates(store) == [Fate.OTHER, Fate.OTHER]

    def test_a_failed_page_has_failed_in_this_run(self, place: Place) -> None:
        store = place.open()
        first = page("page")
        assert first.fingerprint
        enter(store, first)
        failed(store, taken(store), first, via=self.VIA)
        assert self.fates(store) == [Fate.FAILED, Fate.FAILED]
        fates = next_run(place, "2").apply(Batch(asked=[first.fingerprint, *self.VIA])).fates
        assert [*fates.values()] == [Fate.UNFINISHED, Fate.OTHER, Fate.OTHER]
        place.close()

    def test_they_survive_a_kill(self, place: Place) -> None:
        enter(place.open(), page("page"), request("retry", via=self.VIA))
        place.die()
        assert self.fates(place.open()) == [Fate.UNFINISHED, Fate.UNFINISHED]
        place.close()


class TestRuns:
    def test_the_first(self, place: Place) -> None:
        place.open(Joining("shop", "monday", {"category": "1a"}))
        opened = place.opened
        assert (opened.run, opened.began, opened.is_first, opened.is_late) == (
            "monday",
            True,
            True,
            False,
        )
        assert (opened.killed, opened.others) == (0, 0)
        assert not opened.died
        assert not opened.differing
        assert opened.ended_at == 0
        assert not any(opened.counts.values())
        assert set(opened.counts) == set(State)
        assert len(place.store.run) == 8
        place.close()

    @pytest.mark.parametrize("name", ["", "monday"])
    def test_joining_the_current_one(self, name: str, place: Place) -> None:
        run = place.open(Joining("shop", "monday", {"a": "1", "b": "2"})).run
        place.close()
        store = place.open(Joining("shop", name, {"a": "1", "b": "3", "c": "4"}))
        assert store.run == run
        opened = place.opened
        assert (opened.run, opened.began, opened.is_first) == ("monday", False, True)
        assert opened.differing == ["b", "c"]
        place.close()
        place.open(Joining("shop", name, {"a": "1", "b": "2"}))
        assert place.opened.differing == []  # those of the run have not changed
        place.close()

    def test_another_name_begins_the_next(self, place: Place) -> None:
        run = place.open(Joining("shop", "monday", {"a": "1"})).run
        enter(place.store, page("left over"))
        place.close()
        store = place.open(Joining("shop", "tuesday", {"a": "2"}))
        assert store.run != run
        opened = place.opened
        assert (opened.run, opened.began, opened.is_first) == ("tuesday", True, False)
        assert opened.differing == []
        assert names(store, 2) == ["left over"]
        place.close()
        place.open(Joining("shop", "", {"a": "2"}))
        assert (place.opened.run, place.opened.differing) == ("tuesday", [])
        place.close()

    def test_the_first_without_a_name(self, place: Place) -> None:
        place.open()
        assert place.opened.run == ""
        place.close()
        place.open(Joining("shop", "monday"))
        assert place.opened.began
        place.close()
        place.open()
        assert (place.opened.run, place.opened.began) == ("monday", False)
        place.close()

    def test_a_late_name(self, place: Place) -> None:
        store = place.open(Joining("shop", "monday"))
        enter(store, page("a"))
        failed(store, taken(store), page("a"))
        store = next_run(place, "tuesday")
        enter(store, page("b"))
        run = store.run
        place.close()
        before = place.queue().counts()
        store = place.open(Joining("shop", "monday"))
        assert (place.opened.is_late, place.opened.began) == (True, False)
        assert place.opened.run == "tuesday"
        reply = store.apply(Batch(want=5))
        assert (reply.taken, reply.is_retired) == ([], True)
        place.close()
        assert sum(place.queue().counts().values()) == sum(before.values())
        store = place.open(Joining("shop", "tuesday"))
        assert store.run == run
        assert sorted(names(store, 5)) == ["a", "b"]
        place.close()

    def test_another_spider(self, place: Place) -> None:
        place.open(Joining("shop"))
        push(place.store, "a")
        place.close()
        with pytest.raises(BloomError) as error:
            place.open(Joining("news"))
        assert "shop" in str(error.value)
        assert "news" in str(error.value)
        assert names(place.open(Joining("shop")), 2) == ["a"]
        place.close()

    def test_start_and_the_end(self, place: Place) -> None:
        store = place.open()
        push(store, "a")
        reply = store.apply(Batch(may_start=True))
        assert (reply.runs_start, reply.is_started) == (True, False)
        found = taken(store)
        reply = store.apply(Batch(start_ended=True))
        assert (reply.runs_start, reply.is_started, reply.ended_at) == (False, True, 0)
        assert store.apply(Batch(is_over=True)).ended_at == 0
        assert done(store, found).ended_at == 0
        ended_at = store.apply(Batch(is_over=True)).ended_at
        assert ended_at > 1_700_000_000
        assert store.apply(Batch()).ended_at == ended_at
        place.close()
        store = place.open()
        assert place.opened.ended_at == ended_at
        place.close()
        place.open(replace(SHOP, run="2"))
        assert place.opened.ended_at == 0
        place.close()

    def test_the_close_tells_what_is_left(self, place: Place) -> None:
        store = place.open()
        for name in "abc":
            push(store, name)
        found = taken(store)
        failed(store, found, page(name_of(found)))
        taken(store)
        closed = store.close()
        left = {state: number for state, number in closed.counts.items() if number}
        assert left == {State.PENDING: 2, State.FAILED: 1}
        assert (closed.others, closed.ended_at) == (0, 0)
        store = place.open()
        store.apply(Batch(may_start=True))
        store.apply(Batch(start_ended=True, ended=[Ended(taken(store).id) for _ in range(2)]))
        ended_at = store.apply(Batch(is_over=True)).ended_at
        closed = store.close()
        assert closed.counts[State.FAILED] == sum(closed.counts.values()) == 1
        assert closed.ended_at == ended_at > 0

    def test_it_has_not_ended_if_a_request_enters(self, store: Store) -> None:
        store.apply(Batch(may_start=True))
        store.apply(Batch(start_ended=True))
        assert store.apply(Batch(is_over=True)).ended_at
        push(store, "a")
        assert store.apply(Batch(is_over=True)).ended_at == 0


def die_with(place: Place, number: int) -> list[str]:
    """Take so many requests, and die with them; the names of dead ones, once the next is open."""
    for _ in range(number):
        taken(place.store)
    died = place.die()
    place.open()
    died += place.opened.died
    return [name_of(Taken(0, data, "")) for data in died]


class TestDeaths:
    def test_requests_are_taken_again_in_order(self, place: Place) -> None:
        store = place.open()
        for name in "abc":
            push(store, name, newest_first=False)
        assert die_with(place, 2) == []
        assert names(place.store, 5) == ["a", "b", "c"]
        place.close()

    def test_suspects_are_taken_alone(self, place: Place) -> None:
        for name in "abc":
            push(place.open() if name == "a" else place.store, name, newest_first=False)
        for _ in range(3):
            assert die_with(place, 2) == []
        assert numbers(place) == {"pending": 1, "suspect": 2}
        reply = place.store.apply(Batch(want=5))
        assert [name_of(each) for each in reply.taken] == ["c"]
        assert (reply.pending, reply.left) == (0, 3)
        assert take(place.store) is None  # while another is in flight
        done(place.store, *reply.taken)
        (first,) = place.store.apply(Batch(want=5)).taken
        assert name_of(first) == "a"
        push(place.store, "child")
        assert take(place.store) is None  # while it is alone
        done(place.store, first)
        assert names(place.store, 1) == ["child"]
        place.close()

    def test_dead_letters(self, place: Place) -> None:
        """A request with which a process dies while it is alone; nothing else is blamed."""
        for name in "ab":
            push(place.open() if name == "a" else place.store, name, newest_first=False)
        for _ in range(3):
            die_with(place, 2)
        assert die_with(place, 1) == ["a"]
        assert numbers(place) == {"suspect": 1, "dead": 1}
        (dead,) = place.queue().requests(State.DEAD)
        assert (dead.tries, dead.reason, dead.fingerprint) == (0, "", None)
        assert names(place.store, 2) == ["b"]
        place.close()

    def test_a_suspect_may_be_taken_next_to_requests_that_stand_still(self, place: Place) -> None:
        push(place.open(), "suspect")
        for _ in range(3):
            die_with(place, 1)
        push(place.store, "waits")
        assert names(place.store, 2) == ["waits"]
        suspect = take(place.store, stands_still=True)
        assert suspect
        assert name_of(suspect) == "suspect"
        died = place.die()
        place.open()
        assert len([*died, *place.opened.died]) == 1
        assert numbers(place) == {"pending": 1, "dead": 1}
        assert [each.deaths for each in place.queue().requests(State.PENDING)] == [0]
        place.close()

    def test_a_suspect_that_stands_still_does_not_block_other_requests(self, place: Place) -> None:
        for name in "ab":
            push(place.open() if name == "a" else place.store, name)
        for _ in range(3):
            die_with(place, 2)
        first = taken(place.store)
        push(place.store, "child")
        assert take(place.store) is None
        child = take(place.store, stands_still=True)
        second = take(place.store, stands_still=True)
        assert child
        assert second
        assert name_of(child) == "child"
        assert {name_of(first), name_of(second)} == {"a", "b"}
        died = place.die()
        place.open()
        assert len([*died, *place.opened.died]) == 1
        assert numbers(place) == {"pending": 1, "suspect": 1, "dead": 1}
        (dead,) = place.queue().requests(State.DEAD)
        assert name_of(dead) == name_of(second)
        place.close()

    def test_a_suspect_that_is_done_is_gone(self, place: Place) -> None:
        push(place.open(), "a")
        for _ in range(3):
            die_with(place, 1)
        done(place.store, taken(place.store))
        assert numbers(place) == {}
        place.close()

    def test_a_clean_close_counts_no_death(self, place: Place) -> None:
        push(place.open(), "a")
        for _ in range(3):
            die_with(place, 1)
        for _ in range(3):
            assert name_of(taken(place.store)) == "a"
            place.close()
            place.open()
            assert numbers(place) == {"suspect": 1}
        place.close()

    def test_each_batch_outlives_a_process_that_is_killed(self) -> None:
        """A real one, at once after its last batch."""
        with tempfile.TemporaryDirectory() as job:
            script = (
                "import os, signal, sys\n"
                "from tests.support.request_queues import *\n"
                "from tests.support.stores import *\n"
                "store = InFiles(Path(sys.argv[1])).open(by_slot=True)\n"
                "for number in range(500):\n"
                "    enter(store, page(str(number), newest_first=False))\n"
                "first, *_ = [taken(store) for _ in range(10)]\n"
                "done(store, first)\n"
                "taken(store)\n"
                "os.kill(os.getpid(), signal.SIGKILL)\n"
            )
            ended = subprocess.run(
                [sys.executable, "-c", script, job],
                timeout=60,
                check=False,
                env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
            )
            assert ended.returncode == -signal.SIGKILL
            place = InFiles(Path(job))
            counts = place.queue().counts()
            assert (counts[State.PENDING], counts[State.IN_FLIGHT]) == (489, 10)
            store = place.open(by_slot=True)
            assert place.opened.killed == 10
            assert enter(store, *(page(str(number)) for number in range(500))) == [False] * 500
            assert names(store, 500) == [str(number) for number in range(1, 500)]
            place.close()


class TestCommands:
    def test_requests_in_order(self, place: Place) -> None:
        store = place.open(by_slot=True)
        for number, slot in itertools.product(range(3), "ba"):
            push(store, f"{slot}{number}", slot=slot, priority=number)
        queue = place.queue()
        assert [*queue.slots().items()] == [("a", 3), ("b", 3)]
        found = list(queue.requests(State.PENDING, "b"))
        assert [name_of(Taken(0, each.data, "")) for each in found] == ["b2", "b1", "b0"]
        assert {each.slot for each in found} == {"b"}
        assert [each.priority for each in found] == [2, 1, 0]
        assert len([*queue.requests(State.PENDING)]) == 6
        assert [*queue.requests(State.PENDING, "c")] == []
        assert [*queue.requests(State.FAILED)] == []
        taken(store)
        (found_in_flight,) = place.queue().requests(State.IN_FLIGHT)
        assert name_of(Taken(0, found_in_flight.data, "")) == "a2"
        place.close()

    def test_progress(self, place: Place) -> None:
        for run in ("monday", "tuesday"):
            store = place.open(Joining("shop", run))
            enter(store, page(run), page(f"{run} 2"))
            done(store, taken(store))
            place.close()
        progress = place.queue().progress()
        assert (progress.spider, progress.run, progress.done) == ("shop", "tuesday", 2)
        assert (progress.handed_over, progress.ended_at) == (0, 0.0)
        assert place.queue().move(State.PENDING, None) == 2
        assert place.queue().progress().done == 4

    def test_dropping_the_pending_requests_of_a_slot(self, place: Place) -> None:
        store = place.open(by_slot=True)
        for number, slot in itertools.product(range(1050), "ab"):
            if slot == "a" or number < 2:
                push(store, f"{slot}{number}", slot=slot)
        place.close()
        assert place.queue().move(State.PENDING, None, "a") == 1050
        assert place.queue().slots() == {"b": 2}
        store = place.open(by_slot=True)
        assert store.apply(Batch()).counters == (1052, 1050)
        assert sorted(names(store, 5)) == ["b0", "b1"]
        place.die()
        assert place.open().pending == 2
        place.close()

    def test_failed_requests(self, place: Place) -> None:
        store = place.open()
        pages = [page(name, slot=f"{name}.example") for name in "abc"]
        for each in pages:
            enter(store, each)
            fail_again(place, each)
        place.close()
        assert place.queue().move(State.FAILED, None, "a.example") == 1
        assert place.queue().move(State.FAILED, State.PENDING, "b.example") == 1
        assert place.queue().move(State.FAILED, State.PENDING, "d.example") == 0
        store = place.open()
        assert numbers(place) == {"pending": 1, "failed": 1}
        fates = store.apply(Batch(asked=[each.fingerprint or b"" for each in pages])).fates
        assert [*fates.values()] == [Fate.FAILED, Fate.UNFINISHED, Fate.FAILED]
        found = taken(store)
        assert (name_of(found), found.tries, found.slot) == ("b", 0, "b.example")
        place.close()

    def test_dead_requests(self, place: Place) -> None:
        place.open()
        enter(place.store, page("page"))
        for run in range(MOST_TRIES):
            fail_again(place, page("page"))
            next_run(place, str(run)).apply(Batch())
        push(place.store, "deadly")
        for _ in range(4):
            die_with(place, 1)
        assert numbers(place) == {"dead": 2}
        place.close()
        assert place.queue().move(State.DEAD, State.PENDING) == 2
        store = place.open()
        found = [taken(store), taken(store)]
        assert {(name_of(each), each.tries) for each in found} == {("page", 0), ("deadly", 0)}
        die_with(place, 0)
        assert numbers(place) == {"pending": 2}  # the first death again
        place.close()

    def test_dropping_dead_requests(self, place: Place) -> None:
        push(place.open(), "deadly")
        for _ in range(4):
            die_with(place, 1)
        place.close()
        assert place.queue().move(State.DEAD, None) == 1
        place.open()
        assert numbers(place) == {}
        place.close()
