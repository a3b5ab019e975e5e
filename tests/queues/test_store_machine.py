"""Any sequence of steps: each store answers as the simplest one does, which is in memory."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from scrapy_bloom.queues.serialized import deserialized
from scrapy_bloom.queues.store import (
    MOST_DEATHS,
    Batch,
    End,
    Ended,
    Entered,
    Joining,
    Opened,
    Reply,
    Row,
    State,
    Taken,
    parsed_order,
)
from tests.support.request_queues import name_of, request
from tests.support.stores import InFiles, InMemory, InRedis, Place


def merged(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    return {name: value for part in parts for name, value in part.items()}


PAGES = [b"page %d" % number for number in range(6)]
SLOTS = "dej"  # in the order of their hashes, too
# Some of the requests in flight, by their places, how they end, and pages on which that depends.
ENDS = st.dictionaries(
    st.integers(0, 5),
    st.tuples(st.sampled_from(End), st.lists(st.sampled_from(PAGES), max_size=2, unique=True)),
    max_size=4,
)
# Which request in flight a request replaces: a place, or one that has ended before.
REPLACES = st.none() | st.none() | st.integers(0, 5) | st.just("ended")
OPTIONS = st.fixed_dictionaries(
    {
        "slot": st.sampled_from(SLOTS),
        "priority": st.integers(-2, 2),
        "rank": st.integers(-1, 1),
    }
)
FILTERED = st.fixed_dictionaries(
    {
        "fingerprint": st.sampled_from(PAGES),
        "is_recorded": st.sampled_from([True, True, True, False]),
        "passes": st.sampled_from([False, False, False, True]),
    }
)
ONCE = st.sampled_from(
    [{}, {}, {"once": True}, {"once": True, "is_start": True}]  # a start request is always `once`
)
UNFILTERED = st.fixed_dictionaries(
    {
        "fingerprint": st.none() | st.sampled_from(PAGES),
        "is_filtered": st.just(False),
        "is_recorded": st.booleans(),
    }
)
STARTS = st.fixed_dictionaries(
    {
        "fingerprint": st.sampled_from(PAGES),
        "is_filtered": st.just(False),
        "is_recorded": st.just(False),
        "once": st.just(True),
        "is_start": st.just(True),
    }
)
REQUESTS = st.lists(
    st.tuples(
        st.tuples(OPTIONS, st.tuples(FILTERED, ONCE).map(merged) | UNFILTERED | STARTS)
        .map(merged)
        .map(lambda values: Entered(b"", **values)),
        REPLACES,
    ),
    max_size=4,
)


class Stores(RuleBasedStateMachine):
    """A store, and the one in memory."""

    def __init__(self, make: Callable[[], Place]) -> None:
        super().__init__()
        self.model, self.place = InMemory(), make()
        self.model.job.starts_once = isinstance(self.place, InRedis)
        self.places: tuple[Place, ...] = (self.model, self.place)
        self.number = self.run = 0
        self.keeps_failed = True
        self.in_flight: list[tuple[Taken, ...]] = []  # the same request, as the two know it
        self.ended: tuple[Taken, ...] | None = None  # one that is not in flight any more

    @initialize(
        newest_first=st.sets(st.integers(-1, 1)),
        keeps_failed=st.sampled_from([True, True, True, False]),
    )
    def begin(self, newest_first: set[int], keeps_failed: bool) -> None:
        self.newest_first, self.keeps_failed = newest_first, keeps_failed
        self.open()

    def open(self, run: str = "") -> None:
        """Open both, and run start()."""
        self.in_flight = []
        for place in self.places:
            joining = Joining("shop", run, keeps_failed=self.keeps_failed)
            place.open(joining)
        one, other = (self.compared(place.opened) for place in self.places)
        assert one == other
        self.apply_to_both(Batch(may_start=True))
        self.apply_to_both(Batch(start_ended=True))

    def compared(self, opened: Opened) -> list[object]:
        counts = dict(opened.counts)
        unreadable = counts.pop(State.UNREADABLE)  # they may be pending already
        counts[State.PENDING] += unreadable
        flags = [opened.run, opened.began, opened.is_first, opened.is_late]
        return [*flags, opened.retried, bool(opened.ended_at), counts]

    def named(self, entered: Entered) -> Entered:
        """The request with a name, and with an order that both stores have."""
        self.number += 1
        return entered._replace(
            data=request(str(self.number)).data,
            newest_first=entered.rank in self.newest_first,
        )

    @rule(
        entered=REQUESTS,
        recorded=st.lists(st.sampled_from(PAGES), max_size=1),
        ends=ENDS,
        want=st.integers(0, 4),
        downloads=st.dictionaries(st.sampled_from(SLOTS), st.integers(1, 3)),
        stands_still=st.booleans(),
        is_over=st.booleans(),
    )
    def batch(
        self,
        entered: list[tuple[Entered, int | str | None]],
        recorded: list[bytes],
        ends: dict[int, tuple[End, list[bytes]]],
        want: int,
        downloads: dict[str, int],
        stands_still: bool,
        is_over: bool,
    ) -> None:
        batch = Batch(
            recorded=recorded,
            want=want,
            downloads=Counter(downloads),
            stands_still=stands_still,
            is_over=is_over,
        )
        own: list[tuple[Entered, ...]] = []
        replaced: set[int] = set()
        for entry, place in entered:
            new = self.named(entry)
            pair: tuple[Taken, ...] | None = None
            if place == "ended":
                pair = self.ended
            elif isinstance(place, int) and place < len(self.in_flight) and place not in replaced:
                pair = self.in_flight[place]
                replaced.add(place)
            own.append(tuple(new._replace(replaces=pair and pair[i].id) for i in range(2)))
        ended: list[tuple[Ended, ...]] = []
        for place, (end, awaits) in sorted(ends.items(), reverse=True):
            if place < len(self.in_flight) and place not in replaced:
                pair = self.in_flight[place]
                ended.append(tuple(Ended(entry.id, end, "503", awaits) for entry in pair))
                replaced.add(place)
        for place in sorted(replaced, reverse=True):
            self.ended = self.in_flight.pop(place)
        self.apply_to_both(batch, own, ended)

    def apply_to_both(
        self,
        batch: Batch,
        entered: list[tuple[Entered, ...]] | None = None,
        ended: list[tuple[Ended, ...]] | None = None,
    ) -> None:
        replies: list[Reply] = []
        for index, place in enumerate(self.places):
            own = replace(
                batch,
                entered=[pair[index] for pair in entered or []],
                ended=[pair[index] for pair in ended or []],
            )
            replies.append(place.store.apply(own))
        model, real = replies
        assert self.answers(real) == self.answers(model)
        self.in_flight += zip(model.taken, real.taken, strict=True)

    def answers(self, reply: Reply) -> list[object]:
        taken = [(name_of(entry), entry.slot, entry.tries) for entry in reply.taken]
        figures = (
            reply.pending,
            reply.unfinished,
            reply.counters,
            reply.given_up,
            bool(reply.ended_at),
        )
        circles = sorted(reply.circles)
        return [reply.queued, reply.added, taken, figures, reply.is_retired, circles]

    @rule()
    def resume(self) -> None:
        for place in self.places:
            place.close()
        self.open()

    @rule()
    def next_run(self) -> None:
        self.run += 1
        for place in self.places:
            place.close()
        self.open(f"run {self.run}")

    @precondition(lambda self: self.run > 1)
    @rule()
    def late(self) -> None:
        for place in self.places:
            place.close()
        self.open("run 1")
        assert self.place.opened.is_late
        self.apply_to_both(Batch(want=3))
        self.resume()

    @rule()
    def die(self) -> None:
        died = [[*place.die()] for place in self.places]
        self.open()
        model, real = ([*some, *p.opened.died] for some, p in zip(died, self.places, strict=True))
        assert model == real

    @precondition(lambda self: self.model.job.of(State.PENDING))
    @rule(want=st.integers(1, 2))
    def die_until_some_are_suspects(self, want: int) -> None:
        for _ in range(4 * len(self.model.job.rows)):
            if self.model.job.of(State.SUSPECT) or not self.model.job.of(State.PENDING):
                break
            self.apply_to_both(Batch(want=want))
            self.die()

    @rule(
        state=st.sampled_from([State.PENDING, State.FAILED, State.DEAD]),
        requeues=st.booleans(),
        slot=st.none() | st.sampled_from(SLOTS),
    )
    def command(self, state: State, requeues: bool, slot: str | None) -> None:
        to = State.PENDING if requeues and state is not State.PENDING else None
        for place in self.places:
            place.close()
        one, other = (place.queue().move(state, to, slot) for place in self.places)
        assert one == other
        self.open()

    @invariant()
    def same_requests(self) -> None:
        if not hasattr(self, "newest_first"):
            return
        model, queue = self.model.queue(), self.place.queue()
        counts = model.status().counts
        assert queue.status().counts == counts
        assert dict(queue.slots()) == dict(model.slots())
        for state in (state for state, number in counts.items() if number):
            one, other = (
                sorted(map(self.shown, entry.requests(state))) for entry in (model, queue)
            )
            assert one == other

    def shown(self, row: Row) -> tuple[object, ...]:
        name, deaths = deserialized(row.data)["name"], min(row.deaths, MOST_DEATHS)
        first: tuple[object, ...] = ()
        if row.first:
            slot, priority, rank, rest = parsed_order(row.first)
            first = (slot, priority, rank, rest[:1], deserialized(rest[1:])["name"])
        order = (row.slot, row.priority, row.rank, row.newest_first)
        pages = (row.page or b"", *row.hops, row.waits_for)
        flags = (row.is_filtered, row.is_start, row.once, row.was_taken)
        return name, row.state.label, order, first, pages, flags, deaths, row.tries, row.reason

    def teardown(self) -> None:
        for place in self.places:
            if hasattr(place, "store"):
                place.close()
            place.end()


@pytest.mark.parametrize("make", [InFiles, InRedis])
@pytest.mark.parametrize("examples", [10, pytest.param(400, marks=pytest.mark.soak)])
def test_any_order_of_steps(make: Callable[[], Place], examples: int) -> None:
    run_state_machine_as_test(
        lambda: Stores(make), settings=settings(max_examples=examples, stateful_step_count=20)
    )
