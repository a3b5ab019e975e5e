"""Any sequence of steps: each store answers as the simplest one does, which is in memory."""

from collections.abc import Callable
from dataclasses import replace

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
    State,
    Stored,
    Taken,
)
from tests.support.request_queues import name_of, request
from tests.support.stores import InFiles, InMemory, InRedis, Place

FINGERPRINTS = [b"page %d" % number for number in range(6)]
SLOTS = "abc"
# Some of the requests in flight, by their places, and how they end.
ENDS = st.dictionaries(st.integers(0, 5), st.sampled_from(End), max_size=4)
OPTIONS = st.fixed_dictionaries(
    {
        "fingerprint": st.none() | st.sampled_from(FINGERPRINTS),
        "slot": st.sampled_from(SLOTS),
        "priority": st.integers(-2, 2),
        "rank": st.integers(-1, 1),
        "is_filtered": st.sampled_from([True, True, False]),
        "is_recorded": st.sampled_from([True, True, False]),
        "once": st.booleans(),
        "via": st.lists(st.sampled_from(FINGERPRINTS), max_size=2),
    }
)
REQUESTS = st.lists(OPTIONS.map(lambda options: Entered(b"", **options)), max_size=4)


class Stores(RuleBasedStateMachine):
    """A store, and the one in memory."""

    def __init__(self, make: Callable[[], Place]) -> None:
        super().__init__()
        self.model, self.place = InMemory(), make()
        self.places: tuple[Place, ...] = (self.model, self.place)
        self.number = self.run = 0
        self.in_flight: list[tuple[Taken, ...]] = []  # the same request, as the two know it

    @initialize(by_slot=st.booleans(), newest_first=st.sets(st.integers(-1, 1)))
    def begin(self, by_slot: bool, newest_first: set[int]) -> None:
        self.by_slot, self.newest_first = by_slot, newest_first
        self.open()

    def open(self, run: str = "") -> None:
        """Open both, and run start()."""
        if not self.place.keeps_last_slot:
            self.model.job.last_slot = ""
        self.in_flight = []
        for place in self.places:
            place.open(Joining("shop", run), by_slot=self.by_slot)
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
            slot=entered.slot if self.by_slot else "",
            newest_first=entered.rank in self.newest_first,
        )

    def first(self, fingerprint: bytes) -> Entered:
        """A request that is kept, with a place of its own in the queue when it is tried again."""
        unique = self.named(Entered(b"", fingerprint, slot=SLOTS[self.number % 3]))
        return unique._replace(priority=100 + self.number)

    @rule(
        entered=REQUESTS,
        recorded=st.lists(st.sampled_from(FINGERPRINTS), max_size=1),
        ends=ENDS,
        via=st.lists(st.sampled_from(FINGERPRINTS), min_size=1, max_size=2, unique=True),
        want=st.integers(0, 4),
        downloads=st.dictionaries(st.sampled_from(SLOTS), st.integers(1, 3)),
        stands_still=st.booleans(),
        is_over=st.booleans(),
    )
    def batch(
        self,
        entered: list[Entered],
        recorded: list[bytes],
        ends: dict[int, End],
        via: list[bytes],
        want: int,
        downloads: dict[str, int],
        stands_still: bool,
        is_over: bool,
    ) -> None:
        batch = Batch(
            [self.named(each) for each in entered],
            recorded,
            asked=FINGERPRINTS,
            want=want,
            downloads=downloads if self.by_slot else {},
            stands_still=stands_still,
            is_over=is_over,
        )
        ended: list[tuple[Ended, ...]] = []
        for place, end in sorted(ends.items(), reverse=True):
            if place < len(self.in_flight):
                taken = self.in_flight.pop(place)
                first = self.first(via[0])
                ended.append(
                    tuple(Ended(each.id, end, via, first, each.tries, "503") for each in taken)
                )
        self.apply_to_both(batch, ended)

    def apply_to_both(self, batch: Batch, ended: list[tuple[Ended, ...]] | None = None) -> None:
        replies: list[Reply] = []
        for index, place in enumerate(self.places):
            own = replace(batch, ended=[pair[index] for pair in ended or []])
            replies.append(place.store.apply(own))
        model, real = replies
        assert self.answers(real) == self.answers(model)
        self.in_flight += zip(model.taken, real.taken, strict=True)

    def answers(self, reply: Reply) -> list[object]:
        taken = [(name_of(each), each.slot, each.tries) for each in reply.taken]
        figures = (reply.pending, reply.left, reply.counters, reply.given_up, bool(reply.ended_at))
        return [reply.queued, taken, dict(reply.fates), figures, reply.is_retired]

    @rule()
    def checkpoint(self) -> None:
        self.place.checkpoint()

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
        if not hasattr(self, "by_slot"):
            return
        counts = self.model.store.counts()
        assert self.place.store.counts() == counts
        queue = self.place.queue()
        assert queue.counts() == counts
        assert dict(queue.slots()) == dict(self.model.queue().slots())
        for state in State:
            model, real = (
                sorted(map(self.shown, each.requests(state)))
                for each in (self.model.queue(), queue)
            )
            assert real == model

    def shown(self, row: Stored) -> tuple[object, ...]:
        data, state, slot, priority, rank, _, deaths, tries, reason, fingerprint = row
        name, deaths = deserialized(data)["name"], min(deaths, MOST_DEATHS)  # Redis counts no more
        return name, state.value, slot, priority, rank, deaths, tries, reason, fingerprint or b""

    def teardown(self) -> None:
        for place in self.places:
            if hasattr(place, "store"):
                place.close()
            place.end()


@pytest.mark.parametrize("make", [InFiles, InRedis])
@pytest.mark.parametrize("examples", [15, pytest.param(400, marks=pytest.mark.soak)])
def test_any_order_of_steps(make: Callable[[], Place], examples: int) -> None:
    run_state_machine_as_test(
        lambda: Stores(make), settings=settings(max_examples=examples, stateful_step_count=30)
    )
