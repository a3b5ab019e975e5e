"""The rules of `scrapy_bloom.queues.store`, for every store, and for one in memory."""

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest

from scrapy_bloom.exceptions import BloomError
from scrapy_bloom.queues.store import (
    MOST_TRIES,
    TO_ITSELF,
    TO_OTHERS,
    TRIES_SECS,
    Batch,
    End,
    Ended,
    Entered,
    Joining,
    Row,
    State,
    Store,
    Taken,
    parsed_order,
)
from tests.support.request_queues import (
    SHOP,
    done,
    enter,
    fail,
    fail_many,
    failed,
    finish,
    first_name,
    flights,
    key,
    name_of,
    names,
    page,
    push,
    redirect,
    replaced,
    request,
    start_page,
    take,
    take_all,
    taken,
    unreadable,
)
from tests.support.stores import InFiles, InMemory, InRedis, Place

PLACES: dict[str, type[Place]] = {"memory": InMemory, "files": InFiles, "redis": InRedis}
# More than are moved at once.
MANY: dict[type[Place], int] = {InMemory: 100, InFiles: 1200, InRedis: 300}
SLOTS = ["", "\0", "a\0b", "a", "b.example", "\ud800", "ÿ", "\U0010ffff", "\x01", "x" * 10_000]


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    place = PLACES[request.param]()
    yield place
    if hasattr(place, "store"):
        place.close()
    place.end()


@pytest.fixture
def store(place: Place) -> Store:
    return place.open()


def numbers(place: Place) -> dict[str, int]:
    """The numbers of requests in each state, without states that have none."""
    counts = place.queue().status().counts
    return {state.label: number for state, number in counts.items() if number}


def visits(place: Place) -> dict[str, Row]:
    """The rows, by the names with which they first entered."""
    queue = place.queue()
    return {first_name(row): row for state in State for row in queue.requests(state)}


def states(place: Place) -> dict[str, str]:
    """The states of the rows, by the names with which they first entered."""
    return {name: row.state.label for name, row in visits(place).items()}


def next_run(place: Place, name: str = "", **options: bool) -> Store:
    """Close the store, and open it for the next run, or for the same one."""
    place.close()
    return place.open(replace(SHOP, run=name), **options)


def run_until_dead(place: Place, request: Entered) -> None:
    """Open the store, and have a request fail in five runs."""
    enter(place.open(), request)
    for run in range(MOST_TRIES):
        failed(place.store, taken(place.store), f"reason {run}")
        start(next_run(place, f"until dead {run}"))


def have_wait(store: Store, number: int) -> Taken:
    """Have so many rows wait for a page, which is in flight."""
    (target,) = flights(store, page("target"))
    enter(store, *(page(str(each_number)) for each_number in range(number)))
    enter(store, *(page("target", replaces=entry.id) for entry in take_all(store)))
    return target


def start(store: Store) -> None:
    """Run a start() that yields nothing; then, failed start requests are tried again."""
    store.apply(Batch(may_start=True))
    store.apply(Batch(start_ended=True))


def die_with(place: Place, number: int) -> list[str]:
    """Take so many requests, and die with them; the names of dead ones, once the next is open."""
    for _ in range(number):
        taken(place.store)
    died = place.die()
    place.open()
    died += place.opened.died
    return [name_of(Taken(0, data, "")) for data in died]


class TestOrder:
    def test_priorities_ranks_and_positions(self, store: Store) -> None:
        push(store, "start 1", rank=1, newest_first=False)
        push(store, "start 2", rank=1, newest_first=False)
        enter(store, request("old"), request("new"))
        push(store, "before all others", rank=-128)
        push(store, "after all others", rank=127)
        push(store, "urgent", priority=5)
        push(store, "late", priority=-5)
        order = ["urgent", "before all others", "new", "old", "start 1", "start 2"]
        assert names(store, 9) == [*order, "after all others", "late"]

    def test_priorities_beyond_64_bits(self, store: Store) -> None:
        for priority in (-(2**70), 0, 2**70):
            push(store, str(priority), priority=priority)
        least, most = request("least", priority=-(2**63) + 2), request("most", priority=2**63 - 2)
        enter(store, least, most)
        assert names(store, 5) == [str(2**70), "most", "0", "least", str(-(2**70))]

    @pytest.mark.parametrize("at_once", [1, 5])
    def test_slots_are_served_round_robin(self, at_once: int, place: Place) -> None:
        """The next slot in order that has the fewest downloads: by hash in Redis, else by name."""
        store = place.open()
        for number, slot in itertools.product(range(3), "dej"):
            push(store, f"{slot}{number}", slot=slot, newest_first=False)
        order: list[Taken] = []
        while len(order) < 5:
            downloads = Counter(["e", *(entry.slot for entry in order)])
            order += store.apply(Batch(want=at_once, downloads=downloads)).taken
        assert [name_of(entry) for entry in order] == ["d0", "j0", "d1", "e0", "j1"]
        assert [entry.slot for entry in order] == [name_of(entry)[0] for entry in order]
        assert (store.apply(Batch()).pending, store.pending) == (4, 4)
        found = take(store, {"d": 9, "e": 2, "j": 3})
        assert found
        assert name_of(found) == "e1"  # after j comes d, but that is busy
        assert len(store.apply(Batch(want=9)).taken) == 3

    def test_slots_of_any_name(self, place: Place) -> None:
        store = place.open()
        for number, slot in itertools.product(range(2), SLOTS):
            push(store, f"{slot} {number}", slot=slot, newest_first=False)
        order = names(store, 2 * len(SLOTS))
        assert sorted(order) == sorted(f"{slot} {n}" for slot in SLOTS for n in range(2))
        assert all(order.index(f"{slot} 0") < order.index(f"{slot} 1") for slot in SLOTS)
        assert take(store) is None

    def test_many_slots(self, place: Place) -> None:
        store = place.open()
        slots, at_once = MANY[type(place)], 100
        for start in range(0, 2 * slots, at_once):
            numbers = range(start, start + at_once)
            options = [(str(n), f"{n % slots}.org") for n in numbers]
            enter(store, *(request(n, slot=slot, newest_first=False) for n, slot in options))
        first = {int(name) for name in names(store, 100)}
        assert len(first) == 100
        assert max(first) < slots  # of as many slots

    def test_requests_return_to_their_place(self, place: Place) -> None:
        """After a close, and after a kill."""
        enter(place.open(), *(request(name, newest_first=False) for name in "abc"))
        assert names(place.store, 2) == ["a", "b"]
        assert names(next_run(place), 2) == ["a", "b"]
        assert place.opened.killed == 0
        place.die()
        assert names(place.open(), 3) == ["a", "b", "c"]


class TestAnswers:
    def test_new_known_and_in_one_batch(self, store: Store) -> None:
        assert enter(store, page("a"), page("b"), page("a")) == [True, True, False]
        assert enter(store, page("b"), page("c")) == [False, True]
        assert store.pending == 3
        requests = [page(str(number % 7), priority=9, newest_first=False) for number in range(20)]
        assert enter(store, *requests) == [True] * 7 + [False] * 13
        assert names(store, 7) == [str(number) for number in range(7)]

    def test_requests_that_are_not_filtered(self, store: Store) -> None:
        unfiltered = page("a", is_filtered=False)  # but recorded
        assert enter(store, unfiltered, unfiltered, page("a")) == [True, True, False]
        assert enter(store, unfiltered, request("b"), request("b")) == [True] * 3

    def test_filtered_but_not_recorded(self, place: Place, store: Store) -> None:
        unrecorded = page("a", is_recorded=False)
        assert enter(store, unrecorded, unrecorded) == [True, True]
        assert enter(store, page("a"), unrecorded) == [True, False]
        pages = [row.page for row in place.queue().requests(State.PENDING)]
        assert sorted(map(bool, pages)) == [False, False, True]

    def test_what_a_subclass_lets_pass(self, place: Place, store: Store) -> None:
        passes = request("again", fingerprint=key("a"), passes=True)
        assert enter(store, page("a"), passes, page("b", passes=True)) == [True] * 3
        pages = {name: row.page for name, row in visits(place).items()}
        assert pages == {"a": key("a"), "again": None, "b": key("b")}
        assert store.knows(key("b"))

    def test_recorded_without_a_request(self, store: Store) -> None:
        """After the requests of the batch."""
        reply = store.apply(Batch([page("a")], recorded=[key("a"), key("b"), key("b")]))
        assert (reply.queued, reply.added, store.pending) == ([True], 2, 1)
        assert store.knows(key("b"))
        assert enter(store, page("b")) == [False]

    def test_known_in_the_next_process(self, place: Place) -> None:
        enter(place.open(), page("a"))
        assert enter(next_run(place), page("a"), page("b")) == [False, True]
        place.die()
        assert enter(place.open(), page("a"), page("b")) == [False, False]

    def test_once_in_each_run(self, place: Place) -> None:
        store, once = place.open(), page("a", once=True)
        assert enter(store, once, once) == [True, False]
        assert store.knows(key("a"))
        assert store.knows(key("a"), once=True)
        assert enter(store, once, page("a")) == [False, False]
        done(store, taken(store))
        store = next_run(place)  # joins the same run
        assert enter(store, once) == [False]
        store = next_run(place, "2")
        assert not store.knows(key("a"), once=True)
        assert enter(store, page("a"), once, once) == [False, True, False]
        assert store.pending == 1
        store = next_run(place, "3")
        done(store, taken(store))  # which records it for this run
        assert enter(store, once) == [False]

    def test_once_for_a_page_that_is_known_or_not_recorded(self, store: Store) -> None:
        unrecorded = page("b", once=True, is_recorded=False)
        assert enter(store, page("a"), page("a", once=True)) == [True, True]
        assert enter(store, page("a", once=True)) == [False]
        assert enter(store, unrecorded, unrecorded, page("b")) == [True, True, True]


class TestEnds:
    def test_done(self, place: Place, store: Store) -> None:
        first, second = flights(store, page("a"), page("b"))
        for _ in range(2):  # the second one changes nothing
            reply = done(store, first, first)
            assert (reply.unfinished, reply.pending, reply.counters) == (1, 0, (2, 1))
        assert numbers(place) == {"in_flight": 1}
        assert done(store, second).unfinished == 0
        assert numbers(place) == {}
        assert enter(store, page("a")) == [False]

    def test_in_one_step_with_the_requests_it_led_to(self, place: Place, store: Store) -> None:
        (parent,) = flights(store, request("parent"))
        children = [request(name, newest_first=False) for name in "abc"]
        reply = store.apply(Batch(children, ended=[Ended(parent.id)], want=1))
        assert [name_of(entry) for entry in reply.taken] == ["a"]
        assert (reply.pending, reply.unfinished, reply.counters) == (2, 3, (4, 1))
        assert numbers(place) == {"pending": 2, "in_flight": 1}

    def test_an_old_take_has_no_effect(self, place: Place) -> None:
        (old,) = flights(place.open(), page("a"))
        place.die()
        new = taken(place.open())
        assert (new.data, new.id != old.id) == (old.data, True)
        assert enter(place.store, page("b", replaces=old.id), page("child")) == [False, True]
        place.store.apply(Batch(ended=[Ended(old.id, end, "503", [key("c")]) for end in End]))
        assert states(place) == {"a": "in_flight", "child": "pending"}
        assert not place.store.knows(key("b"))
        done(place.store, new)
        place.store.apply(Batch(ended=[Ended(new.id, end, "503", [key("c")]) for end in End]))
        assert not replaced(place.store, new, page("b"))
        assert states(place) == {"child": "pending"}

    def test_unreadable_requests_are_for_a_later_process(self, place: Place) -> None:
        store = place.open()
        enter(store, request("gone callback"), request("other"))
        done(store, taken(store))
        unreadable(store, taken(store))
        assert numbers(place) == {"unreadable": 1}
        assert take(store) is None
        assert store.apply(Batch()).unfinished == 0
        unreadable(next_run(place), taken(place.store))
        place.die()
        assert names(place.open(), 2) == ["gone callback"]

    def test_large_requests(self, place: Place) -> None:
        store = place.open()
        sizes = [0, 1, 2**16, 2**24]
        requests = [bytes(range(256)) * (size // 256) + bytes(size % 256) for size in sizes]
        for each_request in requests:
            enter(store, Entered(each_request, slot="a", newest_first=False))
        for each_request in requests:
            found = taken(store)
            assert found.data == each_request
            done(store, found)
        assert take(store) is None


class TestVisits:
    """A retry or a redirect takes the row of the request that it replaces."""

    def test_a_retry_takes_the_row(self, place: Place, store: Store) -> None:
        (first,) = flights(store, page("a", slot="one", priority=3, rank=1, newest_first=False))
        push(store, "other", priority=1, slot="two")
        assert replaced(store, first, request("again", slot="two", priority=2, is_filtered=False))
        assert store.apply(Batch()).counters == (2, 0)
        row = visits(place)["a"]
        assert (row.state, row.page, row.hops) == (State.PENDING, key("a"), ())
        assert (row.slot, row.priority, row.rank, row.newest_first) == ("two", 2, 0, True)
        assert parsed_order(row.first)[:3] == ("one", 3, 1)
        assert (row.was_taken, row.is_filtered) == (True, True)
        assert names(store, 2) == ["again", "other"]

    def test_as_if_it_had_just_entered(self, place: Place) -> None:
        enter(place.open(), *(page(name, newest_first=False) for name in "ab"))
        die_with(place, 1)
        assert visits(place)["a"].deaths == 1
        replaced(place.store, taken(place.store), request("again", newest_first=False))
        assert visits(place)["a"].deaths == 0
        assert names(place.store, 3) == ["b", "again"]

    def test_hops_are_recorded_when_the_row_is_done(self, place: Place, store: Store) -> None:
        assert redirect(store, "a", "b")
        assert replaced(store, taken(store), page("c"))
        assert visits(place)["a"].hops == (key("b"), key("c"))
        assert not store.knows(key("b"))
        assert done(store, taken(store)).added == 2
        assert enter(store, page("a"), page("b"), page("c")) == [False] * 3

    def test_hops_of_requests_that_are_not_filtered_or_recorded(
        self, place: Place, store: Store
    ) -> None:
        for options in ({"is_filtered": False}, {"is_recorded": False}):
            (first,) = flights(store, page(str(options)))
            assert replaced(store, first, page("b", **options))
            assert visits(place)[str(options)].hops == ()
            done(store, taken(store))
        (first,) = flights(store, start_page("a"))
        assert replaced(store, first, page("b", is_filtered=False))
        done(store, taken(store))
        assert enter(store, page("a"), page("b")) == [True, True]


class TestRedirects:
    def test_to_an_open_page_waits(self, place: Place, store: Store) -> None:
        flights(store, page("open"))
        assert not redirect(store, "a", "open")
        row = visits(place)["a"]
        assert (row.state, row.waits_for, row.hops) == (State.WAITING, key("open"), ())
        reply = store.apply(Batch(want=1))
        assert (reply.taken, reply.unfinished, reply.pending, reply.counters) == ([], 1, 0, (2, 0))

    @pytest.mark.parametrize(
        "end", ["hop", "retry", "fails", "waits", "unreadable", "returned", "suspect"]
    )
    def test_pages_that_are_open(self, end: str, place: Place) -> None:
        first, _ = flights(place.open(), page("open"), page("other"))
        if end in {"hop", "waits"}:
            replaced(place.store, first, page("hop" if end == "hop" else "other"))
        elif end == "retry":
            replaced(place.store, first, request("again", is_filtered=False))
        elif end == "fails":
            failed(place.store, first)
        elif end == "unreadable":
            unreadable(place.store, first)
        elif end == "returned":
            place.store.apply(Batch(ended=[Ended(first.id, End.RETURNED)]))
        else:
            for number in (0, 2, 2):  # the first time, they are in flight
                die_with(place, number)
        enter(place.store, page("a", priority=1))
        assert not replaced(
            place.store, taken(place.store), page("hop" if end == "hop" else "open")
        )
        assert states(place)["a"] == "waiting"

    def test_a_page_that_was_never_taken_is_not_open(self, place: Place, store: Store) -> None:
        """It is a duplicate like any other. A page that is new once in each run is open."""
        a, b = flights(store, page("a"), page("b"))
        enter(store, page("queued"), page("once", once=True))
        assert not replaced(store, a, page("queued"))
        assert not replaced(store, b, page("once"))
        assert states(place) == {"b": "waiting", "queued": "pending", "once": "pending"}

    def test_to_itself_has_failed(self, place: Place, store: Store) -> None:
        """Also to a page to which it was redirected before; but not if it is not filtered."""
        assert not redirect(store, "a", "a")
        assert redirect(store, "b", "c")
        assert replaced(store, taken(store), page("d"))
        assert not replaced(store, taken(store), page("c"))
        assert {row.reason for row in visits(place).values()} == {TO_ITSELF}
        assert numbers(place) == {"failed": 2}
        for name, options in {"e": {"is_filtered": False}, "f": {"passes": True}}.items():
            assert replaced(store, flights(store, page(name))[0], page(name, **options))
            done(store, taken(store))

    def test_to_a_page_that_is_dead(self, place: Place) -> None:
        """By tries: it is queued as a new page would be. By deaths: it waits."""
        run_until_dead(place, page("dead"))
        assert enter(place.store, page("dead")) == [False]  # a link is a duplicate
        assert redirect(place.store, "a", "dead")
        assert visits(place)["a"].hops == (key("dead"),)
        done(place.store, taken(place.store))
        assert numbers(place) == {}
        enter(place.store, page("deadly"))
        for _ in range(4):
            die_with(place, 1)
        assert not redirect(place.store, "b", "deadly")
        assert states(place) == {"b": "waiting", "deadly": "dead"}

    def test_to_another_duplicate_is_done(self, place: Place, store: Store) -> None:
        done(store, *flights(store, page("known")))
        assert redirect(store, "a", "hop")
        assert not replaced(store, taken(store), page("known"))
        assert numbers(place) == {}
        assert enter(store, page("a"), page("hop")) == [False, False]

    def test_to_a_page_that_is_new_in_this_run(self, place: Place) -> None:
        done(place.open(), *flights(place.store, page("known", once=True)))
        store = next_run(place, "2")
        (first,) = flights(store, page("a", once=True))
        assert replaced(store, first, page("known", once=True))
        done(store, taken(store))
        assert enter(store, page("known", once=True)) == [False]


class TestLinks:
    def test_to_a_hop_waits(self, place: Place) -> None:
        """It is recorded then, so there is at most one; it ends as the row of the hop does."""
        for name in ("done", "fails"):
            store = place.open() if name == "done" else place.store
            redirect(store, name, f"{name} hop")
            assert enter(store, page(f"{name} hop"), page(f"{name} hop")) == [False, False]
            row = visits(place)[f"{name} hop"]
            assert (row.state, row.waits_for, row.page) == (State.WAITING, row.page, row.page)
            (done if name == "done" else failed)(store, taken(store))
        assert states(place) == {"fails": "failed", "fails hop": "waiting"}
        assert place.store.apply(Batch()).counters == (4, 2)
        assert enter(place.store, page("fails hop")) == [False]
        assert sorted(names(next_run(place, "2"), 3)) == ["fails", "fails hop"]

    def test_to_a_hop_for_which_it_does_not_wait(self, place: Place) -> None:
        """Another row has it as its page; it is new once in each run; its row has failed before."""
        for name in "abc":
            redirect(place.open() if name == "a" else place.store, f"to {name}", name)
            found = taken(place.store)
        assert enter(place.store, start_page("a"), page("a"), page("a")) == [True, True, False]
        assert enter(place.store, page("b", once=True)) == [True]
        failed(place.store, found)
        next_run(place, "2").apply(Batch())
        assert enter(place.store, page("c")) == [True]


class TestWaiting:
    def test_a_page_that_is_done_ends_waiting_rows(self, place: Place, store: Store) -> None:
        """In a chain, and their hops are recorded."""
        (last,) = flights(store, page("last"))
        redirect(store, "b", "hop")
        replaced(store, taken(store), page("last"))
        redirect(store, "c", "hop")
        redirect(store, "d", "c")
        assert numbers(place) == {"in_flight": 1, "waiting": 3}
        assert not store.knows(key("hop"))
        finish(store, last)
        assert numbers(place) == {}
        assert store.apply(Batch()).counters == (4, 4)
        assert enter(store, page("hop")) == [False]

    def test_a_long_chain(self, place: Place) -> None:
        number, store = MANY[type(place)], place.open()
        enter(store, *(page(str(each_number), newest_first=False) for each_number in range(number)))
        found = take_all(store)
        for start in range(1, number, 100):
            some = range(start, min(start + 100, number))
            enter(store, *(page(str(entry - 1), replaces=found[entry].id) for entry in some))
        assert numbers(place) == {"in_flight": 1, "waiting": number - 1}
        finish(store, found[0])
        assert numbers(place) == {}

    @pytest.mark.parametrize("then", ["continues", "dies", "next run"])
    def test_many_rows_end(self, then: str, place: Place) -> None:
        """Some with each batch, also of a later process, for which Redis may try some again."""
        number, again = MANY[type(place)], 0
        reply = done(place.open(), have_wait(place.store, number))
        assert numbers(place).get("waiting", 0) >= number - place.slice_size
        if then == "dies":
            place.die()
            place.open()
        elif then == "next run":
            next_run(place, "2")
        while reply.unfinished:
            before = numbers(place).get("waiting", 0)
            reply = place.store.apply(Batch(want=50))
            if then == "continues":
                assert before - numbers(place).get("waiting", 0) <= place.slice_size
            done(place.store, *reply.taken)
            again += len(reply.taken)
        assert not again or (isinstance(place, InRedis) and then != "continues")
        assert place.store.apply(Batch()).counters == (number + 1, number + 1)
        assert numbers(place) == {}

    def test_a_page_on_which_another_end_depends(self, place: Place, store: Store) -> None:
        one, other = flights(store, page("one"), page("other"))
        awaits = {"waits": ["one", "one"], "fails": ["one", "other"], "ends": ["ends", "gone"]}
        for name, pages in awaits.items():
            done(store, *flights(store, page(name)), awaits=[key(each_page) for each_page in pages])
        rows = visits(place)
        assert {*rows} == {"one", "other", "waits", "fails"}
        assert (rows["waits"].state, rows["waits"].waits_for) == (State.WAITING, key("one"))
        assert (rows["fails"].state, rows["fails"].reason) == (State.FAILED, TO_OTHERS)
        finish(store, one, other)
        assert states(place) == {"fails": "failed"}
        flights(store, page("own"))
        done(store, *flights(store, start_page("own")), awaits=[key("own")])
        assert states(place) == {"fails": "failed", "own": "in_flight"}

    def test_a_circle_is_reported_once(self, place: Place) -> None:
        a, b = flights(place.open(), page("a"), page("b"))
        assert not replaced(place.store, a, page("b"))
        assert place.store.apply(Batch([page("a", replaces=b.id)])).circles == [b.data]
        assert place.store.apply(Batch(want=2)).circles == []
        assert numbers(place) == {"waiting": 2}
        assert sorted(names(next_run(place, "2"), 3)) == ["a", "b"]

    def test_an_errback_that_takes_over(self, place: Place, store: Store) -> None:
        """Its page is done, and nobody has crawled the pages to which it was redirected."""
        redirect(store, "a", "hop")
        hop = taken(store)
        redirect(store, "b", "a")
        redirect(store, "c", "hop")
        store.apply(Batch([request("instead")], ended=[Ended(hop.id, End.TAKEN_OVER)]))
        store.apply(Batch())
        assert states(place) == {"c": "waiting", "instead": "pending"}
        assert enter(store, page("a"), page("hop")) == [False, True]

    def test_nothing_is_kept(self, place: Place) -> None:
        """With BLOOM_KEEP_FAILED = False, what would be kept ends as done."""
        store = place.open(replace(SHOP, keeps_failed=False))
        redirect(store, "a", "hop")
        hop = taken(store)
        redirect(store, "b", "hop")
        assert enter(store, page("hop")) == [False]
        redirect(store, "c", "c")
        done(store, *flights(store, page("d")), awaits=[key("a")])
        assert states(place) == {"a": "in_flight"}
        failed(store, hop)
        assert numbers(place) == {}
        assert enter(store, *map(page, ["a", "b", "c", "d", "hop"])) == [False] * 5


class TestFailed:
    def test_it_is_tried_again_as_it_first_entered(self, place: Place) -> None:
        first = page("page", slot="a", priority=3, rank=1, newest_first=False)
        (found,) = flights(place.open(), first)
        replaced(place.store, found, page("hop", slot="b", priority=7))
        enter(place.store, request("other", priority=-1, slot="b"))
        reply = failed(place.store, taken(place.store), "503")
        assert (reply.unfinished, reply.pending, reply.counters) == (1, 1, (2, 0))
        row = visits(place)["page"]
        assert (row.state, row.slot, row.tries, row.reason) == (State.FAILED, "b", 0, "503")
        assert enter(place.store, page("page")) == [False]
        store = next_run(place, "2")
        assert (place.opened.retried, place.opened.counts[State.FAILED]) == (1, 1)
        reply = store.apply(Batch())
        assert (reply.pending, reply.unfinished, reply.given_up) == (2, 2, 0)
        row = visits(place)["page"]
        assert (row.state, row.data, row.first) == (State.PENDING, first.data, b"")
        assert (row.slot, row.priority, row.rank, row.newest_first) == ("a", 3, 1, False)
        assert (row.page, row.hops, row.tries, row.deaths) == (key("page"), (), 1, 0)
        assert (row.reason, row.waits_for, row.was_taken) == ("", b"", True)
        assert [taken(store).tries, taken(store).tries] == [1, 0]

    def test_a_waiting_row_is_tried_again_too(self, place: Place) -> None:
        (target,) = flights(place.open(), page("target"))
        redirect(place.store, "a", "target")
        failed(place.store, target)
        assert states(place) == {"target": "failed", "a": "waiting"}  # nothing happens to it
        store = next_run(place, "2")
        assert place.opened.retried == 2
        requests = store.apply(Batch(want=3)).taken
        assert {name_of(each_request): each_request.tries for each_request in requests} == {
            "a": 1,
            "target": 1,
        }
        done(store, requests[0])
        assert len(visits(place)) == 1  # it waits for nothing any more

    def test_a_run_that_is_resumed_or_joined_does_not_try_it_again(self, place: Place) -> None:
        """Or workers that are late on one night would use up its five tries."""
        fail(place.open(replace(SHOP, run="monday")), page("page"))
        push(place.store, "other")
        found = taken(next_run(place))
        assert (place.opened.retried, name_of(found)) == (0, "other")
        done(place.store, found)
        assert take(next_run(place, "monday")) is None
        assert place.opened.retried == 0
        assert numbers(place) == {"failed": 1}
        store = next_run(place)  # which begins with nothing else left
        assert (place.opened.began, place.opened.retried) == (False, 1)
        assert taken(store).tries == 1

    def test_a_command_begins_no_run_and_tries_nothing_again(self, place: Place) -> None:
        store = place.open(Joining("shop", is_crawl=False))
        assert (place.opened.run, place.opened.began, store.run) == ("", False, b"")
        fail(next_run(place), page("page"))
        for run in ("", "2"):
            place.close()
            store = place.open(Joining("shop", run, is_crawl=False))
            assert (place.opened.began, place.opened.retried) == (False, 0)
            assert enter(store, request(f"added {run}")) == [True]
            assert take(next_run(place))
        assert numbers(place)["failed"] == 1

    def test_runs_without_names_are_a_try_once_an_hour(self, place: Place) -> None:
        """Also when the clock went back."""
        fail(place.open(), page("page"))
        assert (place.opened.run, place.opened.began) == ("", True)
        for secs, tries in ((0, 0), (TRIES_SECS - 60, 0), (60, 1), (10, 1), (-20, 2)):
            place.close()
            place.age(secs)
            found = taken(place.open())
            assert found.tries == tries
            failed(place.store, found)

    def test_it_is_dead_after_five_runs(self, place: Place) -> None:
        store = place.open()
        enter(store, page("page"))
        for run in range(MOST_TRIES):
            assert numbers(place) == {"pending": 1}, run
            failed(store, taken(store), f"reason {run}")
            store = next_run(place, f"run {run + 2}")
            assert place.opened.retried == 1
            reply = store.apply(Batch())
            assert reply.given_up == (run + 1 == MOST_TRIES)
        assert (reply.unfinished, reply.pending, reply.died, numbers(place)) == (
            0,
            0,
            [],
            {"dead": 1},
        )
        dead = visits(place)["page"]
        assert (dead.tries, dead.reason, dead.deaths) == (MOST_TRIES, "reason 4", 0)
        assert take(next_run(place, "last")) is None
        assert numbers(place) == {"dead": 1}

    def test_a_filtered_row_takes_the_place_of_others(self, place: Place) -> None:
        """Its tries are the most of those that failed; a dead one is replaced."""
        run_until_dead(place, page("dead"))
        fail(place.store, page("failed"))
        failed(next_run(place, "2"), taken(place.store))
        assert visits(place)["failed"].tries == 1
        unrecorded = {"once": True, "is_recorded": False, "is_start": True}
        fail(place.store, page("failed", **unrecorded), page("dead", **unrecorded))
        tries = {name: (row.state.label, row.tries) for name, row in visits(place).items()}
        assert tries == {"failed": ("failed", 1), "dead": ("failed", 0)}
        assert sum(numbers(place).values()) == 2

    def test_sessions_of_one_page_are_separate_rows(self, place: Place) -> None:
        """Five requests that are not filtered, with different cookie jars."""
        sessions = [request(f"session {number}", is_filtered=False) for number in range(5)]
        fail(place.open(), *sessions)
        assert numbers(place) == {"failed": 5}
        assert sorted(names(next_run(place, "2"), 9)) == [f"session {n}" for n in range(5)]

    def test_many_are_tried_again(self, place: Place) -> None:
        """Some with each batch; the crawl is not over before that."""
        number, store = MANY[type(place)], place.open()
        fail_many(store, number // 2, "and ")
        failed(store, have_wait(store, number - number // 2 - 1))
        store = next_run(place, "2")
        assert place.opened.retried == number
        pending = 0
        while pending < number:
            reply = store.apply(Batch())
            assert reply.unfinished == number
            assert 0 < reply.pending - pending <= place.slice_size
            pending = reply.pending
        assert numbers(place) == {"pending": number}
        assert {row.tries for row in place.queue().requests(State.PENDING)} == {1}

    def test_rows_whose_slice_has_not_come_yet(self, place: Place) -> None:
        """They count as pending from when the run begins.

        Nothing ends them, and their pages are open. Otherwise, two pages that are redirected to
        each other in turn end each other.
        """
        number, store = MANY[type(place)] // 2, place.open()
        fail_many(store, number)
        flights(store, page("target", priority=2))
        redirect(store, "waits", "target")
        fail_many(store, number, "and ")
        enter(store, page("link", priority=1))
        store = next_run(place, "2")
        requests = [taken(store), taken(store)]
        assert [name_of(each_request) for each_request in requests] == ["target", "link"]
        assert not replaced(store, requests[1], page("waits"))
        done(store, requests[0])
        while numbers(place).get("failed"):
            store.apply(Batch())
        assert numbers(place) == {"pending": 2 * number + 1, "waiting": 1}
        assert states(place)["link"] == "waiting"


class TestStartPages:
    def test_it_is_neither_looked_up_nor_recorded(self, place: Place, store: Store) -> None:
        done(store, *flights(store, page("a")))
        assert enter(store, start_page("a"), start_page("b"), page("b")) == [True] * 3
        assert visits(place)["a"].page == key("a")

    def test_a_filtered_one_that_always_fails(self, place: Place) -> None:
        """It is one request in each run, and one row."""
        start = page("start", once=True, is_start=True)
        for run in range(2 * MOST_TRIES):
            store = next_run(place, str(run)) if run else place.open()
            store.apply(Batch())  # its row does not become pending before start() has ended
            assert enter(store, start, start) == [True, False]
            found = taken(store)
            assert found.tries == min(run, MOST_TRIES - 1)
            assert take(store) is None
            failed(store, found)
            assert enter(store, start) == [False]
            assert numbers(place) == {"failed": 1}

    def test_one_takes_the_place_of_one(self, place: Place) -> None:
        """Of one that has failed, waits, is dead or pending, from before this process."""
        run_until_dead(place, start_page("dead"))
        fail(place.store, start_page("fails"), page("fails", data=request("link").data))
        done(place.store, *flights(place.store, start_page("waits")), awaits=[key("fails")])
        flights(place.store, start_page("taken"))
        starts = [start_page(name) for name in ("dead", "fails", "waits", "taken", "queued")]
        enter(place.store, starts[-1])
        for _ in range(2):
            assert enter(next_run(place, "next"), *starts) == [True] * 5
            assert numbers(place) == {"pending": 6}
            tries = {name: row.tries for name, row in sorted(visits(place).items())}
            assert [*tries.values()] == [4, 1, 1, 0, 0, 1]

    def test_sessions_of_one_page(self, place: Place) -> None:
        """Each takes the place of one of an earlier start(); other rows of the page stay."""
        sessions = [start_page("a", data=request(str(number)).data) for number in range(5)]
        assert enter(place.open(), *sessions) == [True] * 5
        requests = place.store.apply(Batch(want=9)).taken
        for each_request in requests[:4]:
            failed(place.store, each_request)
        done(place.store, requests[4])
        fail(place.store, page("a"))
        assert numbers(place) == {"failed": 5}
        for left in ({"failed": 1}, {}):
            next_run(place, "2").apply(Batch())
            assert enter(place.store, *sessions[:3]) == [True] * 3
            assert numbers(place) == {"pending": 5 - len(left)} | left


class TestRuns:
    def test_the_first(self, place: Place) -> None:
        place.open(Joining("shop", "monday"))
        opened = place.opened
        assert (opened.run, opened.began, opened.is_first) == ("monday", True, True)
        assert (opened.is_late, opened.killed, opened.others) == (False, 0, 0)
        assert (opened.ended_at, list(opened.died)) == (0, [])
        assert not any(opened.counts.values())
        assert set(opened.counts) == set(State)
        assert len(place.store.run) == 8

    @pytest.mark.parametrize("name", ["", "monday"])
    def test_joining_the_current_one(self, name: str, place: Place) -> None:
        run = place.open(Joining("shop", "monday")).run
        place.close()
        store = place.open(Joining("shop", name))
        assert store.run == run
        opened = place.opened
        assert (opened.run, opened.began, opened.is_first) == ("monday", False, True)

    def test_another_name_begins_the_next(self, place: Place) -> None:
        run = place.open(Joining("shop", "monday")).run
        enter(place.store, page("left over"))
        place.close()
        store = place.open(Joining("shop", "tuesday"))
        opened = place.opened
        assert (opened.run, opened.began, opened.is_first) == ("tuesday", True, False)
        assert store.run != run
        assert names(store, 2) == ["left over"]
        place.close()
        place.open(Joining("shop", ""))
        assert place.opened.run == "tuesday"

    def test_a_late_name(self, place: Place) -> None:
        fail(place.open(Joining("shop", "monday")), page("a"))
        store = next_run(place, "tuesday")
        enter(store, page("b"))
        run = store.run
        store = next_run(place, "monday")
        assert (place.opened.is_late, place.opened.began) == (True, False)
        assert place.opened.run == "tuesday"
        reply = store.apply(Batch(want=5))
        assert (reply.taken, reply.is_retired) == ([], True)
        assert sum(numbers(place).values()) == 2
        store = next_run(place, "tuesday")
        assert store.run == run
        assert sorted(names(store, 5)) == ["a", "b"]

    def test_another_spider(self, place: Place) -> None:
        push(place.open(Joining("shop")), "a")
        place.close()
        with pytest.raises(BloomError, match="shop") as error:
            place.open(Joining("news"))
        assert "news" in str(error.value)
        assert names(place.open(Joining("shop")), 2) == ["a"]

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
        next_run(place)
        assert place.opened.ended_at == ended_at
        store = next_run(place, "2")
        assert place.opened.ended_at == 0
        start(store)
        assert store.apply(Batch(is_over=True)).ended_at
        push(store, "a")  # so that it has not ended
        assert store.apply(Batch(is_over=True)).ended_at == 0

    def test_the_close_tells_what_is_left(self, place: Place) -> None:
        fail(place.open(), request("a"))
        enter(place.store, request("b"), request("c"))
        taken(place.store)
        closed = place.store.close()
        left = {state: number for state, number in closed.counts.items() if number}
        assert left == {State.PENDING: 2, State.FAILED: 1}
        assert closed.ended_at == 0
        store = place.open()
        start(store)
        done(store, *store.apply(Batch(want=2)).taken)
        ended_at = store.apply(Batch(is_over=True)).ended_at
        closed = store.close()
        assert closed.counts[State.FAILED] == sum(closed.counts.values()) == 1
        assert closed.ended_at == ended_at > 0
        place.open()


class TestDeaths:
    def test_suspects_are_taken_alone(self, place: Place) -> None:
        enter(place.open(), *(request(name, newest_first=False) for name in "abc"))
        for _ in range(3):
            assert die_with(place, 2) == []
        assert numbers(place) == {"pending": 1, "suspect": 2}
        reply = place.store.apply(Batch(want=5))
        assert [name_of(entry) for entry in reply.taken] == ["c"]
        assert (reply.pending, reply.unfinished) == (0, 3)
        assert take(place.store) is None  # while another is in flight
        done(place.store, *reply.taken)
        (first,) = place.store.apply(Batch(want=5)).taken
        assert name_of(first) == "a"
        push(place.store, "child")
        assert take(place.store) is None  # while it is alone
        done(place.store, first)
        assert names(place.store, 1) == ["child"]

    def test_dead_letters(self, place: Place) -> None:
        """A request with which a process dies while it is alone; nothing else is blamed."""
        enter(place.open(), *(request(name, newest_first=False) for name in "ab"))
        for _ in range(3):
            die_with(place, 2)
        assert die_with(place, 1) == ["a"]
        assert numbers(place) == {"suspect": 1, "dead": 1}
        (dead,) = place.queue().requests(State.DEAD)
        assert (dead.tries, dead.reason, dead.page) == (0, "", None)
        assert names(place.store, 2) == ["b"]

    def test_a_suspect_may_be_taken_next_to_requests_that_stand_still(self, place: Place) -> None:
        push(place.open(), "suspect")
        for _ in range(3):
            die_with(place, 1)
        push(place.store, "waits")
        assert names(place.store, 2) == ["waits"]
        suspect = take(place.store, stands_still=True)
        assert suspect
        assert name_of(suspect) == "suspect"
        assert die_with(place, 0) == ["suspect"]
        assert numbers(place) == {"pending": 1, "dead": 1}
        assert [each_request.deaths for each_request in place.queue().requests(State.PENDING)] == [
            0
        ]

    def test_a_clean_close_counts_no_death(self, place: Place) -> None:
        push(place.open(), "a")
        for _ in range(3):
            die_with(place, 1)
        for _ in range(3):
            assert name_of(taken(place.store)) == "a"
            next_run(place)
            assert numbers(place) == {"suspect": 1}
        done(place.store, taken(place.store))
        assert numbers(place) == {}


class TestCommands:
    def test_requests_in_order(self, place: Place) -> None:
        store = place.open()
        for number, slot in itertools.product(range(3), "ba"):
            push(store, f"{slot}{number}", slot=slot, priority=number)
        queue = place.queue()
        assert [*queue.slots().items()] == [("a", 3), ("b", 3)]
        rows = list(queue.requests(State.PENDING, "b"))
        assert [first_name(row) for row in rows] == ["b2", "b1", "b0"]
        assert [(row.slot, row.priority) for row in rows] == [("b", 2), ("b", 1), ("b", 0)]
        assert len([*queue.requests(State.PENDING)]) == 6
        assert [*queue.requests(State.PENDING, "c"), *queue.requests(State.FAILED)] == []
        taken(store)
        assert [first_name(row) for row in place.queue().requests(State.IN_FLIGHT)] == ["a2"]

    def test_status(self, place: Place) -> None:
        for run in ("monday", "tuesday"):
            store = place.open(Joining("shop", run))
            enter(store, page(run), page(f"{run} 2"))
            done(store, taken(store))
            place.close()
        status = place.queue().status()
        assert (status.spider, status.run, status.done) == ("shop", "tuesday", 2)
        assert (status.handed_over, status.ended_at, status.total) == (0, 0.0, 2)
        assert place.queue().move(State.PENDING, None) == 2
        assert place.queue().status().done == 4
        place.open()

    def test_dropping_the_pending_requests_of_a_slot(self, place: Place) -> None:
        number, others = MANY[type(place)], [request("b0", slot="b"), request("b1", slot="b")]
        enter(place.open(), *others)
        enter(place.store, *(request(f"a{each_number}", slot="a") for each_number in range(number)))
        place.close()
        assert place.queue().move(State.PENDING, None, "a") == number
        assert place.queue().slots() == {"b": 2}
        store = place.open()
        assert store.apply(Batch()).counters == (number + 2, number)
        assert sorted(names(store, 5)) == ["b0", "b1"]
        place.die()
        assert place.open().pending == 2

    def test_dead_requests(self, place: Place) -> None:
        run_until_dead(place, page("page"))
        push(place.store, "deadly")
        for _ in range(4):
            die_with(place, 1)
        place.close()
        assert place.queue().move(State.DEAD, State.PENDING) == 2
        requests = place.open().apply(Batch(want=9)).taken
        tries = {name_of(each_request): each_request.tries for each_request in requests}
        assert tries == dict.fromkeys(("page", "deadly"), 0)
        die_with(place, 0)
        assert numbers(place) == {"pending": 2}  # the first death again
        place.close()
        assert place.queue().move(State.PENDING, None) == 2
        place.open()
        assert numbers(place) == {}
