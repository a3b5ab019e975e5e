"""Shares of the limits of hosts: how they are divided, and workers that come and go."""

import heapq
import itertools
import random
import statistics
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable

import pytest

from scrapy_bloom.queues.shares import NO_MEMBER, Limit, Limits, Membership, Shares
from scrapy_bloom.queues.store import Share, slot_key
from tests.support.crawls import ROOT

NAMES = [f"www.shop-{number}.example" for number in range(20_000)]
LIMITS = [Limit(1), Limit(8), Limit(1000), Limit(8, delay=2.0), Limit(0, delay=0.5)]


def hash_of(slot: str) -> int:
    return int.from_bytes(slot_key(slot)[:4], "big")


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("workers", [1, 2, 7, 50])
def test_the_shares_of_all_workers_are_the_limit(limit: Limit, workers: int) -> None:
    members = [Membership(workers, rank) for rank in range(workers)]
    for slot in NAMES[:200]:
        shares = [each.share(limit, hash_of(slot)) for each in members]
        if not limit.delay:
            assert sum(shares) == limit.concurrency
            assert max(shares) - min(shares) <= 1
        else:
            assert sum(map(bool, shares)) == 1
            assert max(shares) >= (limit.concurrency or 100)


@pytest.mark.parametrize("limit", LIMITS)
def test_the_ranges_are_those_of_the_shares(limit: Limit) -> None:
    """Also of slots with a limit of their own, and while a share does not count yet."""
    dice = random.Random(0)
    special = {slot: dice.choice(LIMITS) for slot in dice.sample(NAMES, 20)}
    for _ in range(50):
        shares = Shares(Limits(limit, special))
        now = 0.0
        for _ in range(dice.randint(1, 3)):
            workers = dice.randint(1, 50)
            shares.change(Membership(workers, dice.randrange(workers)), now)
            now += dice.choice([0.1, 0.7, 3])
        ranges, own = shares.ranges(now)
        assert ranges == sorted(ranges)
        for slot in [*NAMES[:50], *special]:
            member = slot_key(slot) + b"\0"
            found = [each.number for each in ranges if each.first <= member < each.last]
            number = own.get(slot_key(slot), sum(found))
            assert number == shares.of(slot, now)
            assert len(found) <= 1


def test_a_share_that_has_grown_counts_later() -> None:
    slot = NAMES[0]
    shares = Shares(Limits(Limit(4), {"slow": Limit(4, delay=5.0)}))
    assert shares.of(slot, 0.0) == 0
    shares.change(Membership(1, 0), 0.0)
    assert (shares.of(slot, 0.0), shares.of("slow", 0.0)) == (4, 4)  # nobody has had them
    shares.change(Membership(2, 0), 1.0)
    assert shares.of(slot, 1.0) == 2
    shares.change(Membership(1, 0), 1.5)
    owner = 4 if Membership(2, 0).share(Limit(4, delay=5.0), hash_of("slow")) else 0
    assert [shares.of(slot, now) for now in (1.5, 2.4, 2.6)] == [2, 2, 4]
    assert [shares.of("slow", now) for now in (2.6, 6.4, 6.6)] == [owner, owner, 4]
    shares.change(NO_MEMBER, 7.0)
    assert shares.of(slot, 7.0) == 0
    shares.change(Membership(2, 1), 8.0)
    assert [shares.of(slot, now) for now in (8.9, 9.1)] == [0, 2]


def test_fewer_than_half_of_the_shares_move_when_a_worker_joins() -> None:
    moved = []
    for workers, limit in itertools.product((2, 5, 20, 49), (Limit(8), Limit(8, delay=1.0))):
        before, after = (
            [[m.share(limit, hash_of(slot)) for slot in NAMES[:500]] for m in members]
            for members in (
                [Membership(n, rank) for rank in range(workers)] for n in (workers, workers + 1)
            )
        )
        lost = sum(
            max(0, old - new)
            for olds, news in zip(before, after, strict=True)
            for old, new in zip(olds, news, strict=True)
        )
        moved.append(lost / sum(map(sum, before)))
    assert max(moved) < 0.5


def without_any(hosts: int, workers: int, limit: Limit) -> float:
    """How many workers have no share of a host, usually."""
    dice = random.Random(1)
    numbers = []
    for _ in range(50):
        hashes = [dice.getrandbits(32) for _ in range(hosts)]
        members = [Membership(workers, rank) for rank in range(workers)]
        numbers.append(sum(not any(m.share(limit, h) for h in hashes) for m in members))
    return statistics.mean(numbers)


def test_how_many_workers_have_no_host() -> None:
    text = " ".join((ROOT / "docs/distributed.md").read_text().split())
    without, with_delay = (without_any(16, 50, Limit(8, delay)) for delay in (0.0, 1.0))
    assert (
        f"about {without:.0f} have no share of any host; with a delay, about {with_delay:.0f}."
        in text
    )


# A simulation of workers that come and go.

ASK_SECS, LOOK_SECS, SILENT_SECS = 0.5, 0.1, 30.0
PREFETCH, DOWNLOADS = 16, 16


class Server:
    """The queue: pending requests by slot, and the workers that ask for them."""

    def __init__(self, slots: list[str], requests: int, dice: random.Random) -> None:
        self.members: list[Worker] = []
        self.pending: Counter[str] = Counter()
        self._keys: list[tuple[bytes, str]] = []  # of slots with pending requests, sorted
        self.put(Counter(dice.choices(slots, k=requests)))

    def put(self, requests: Counter[str]) -> None:
        for slot in +requests:
            if not self.pending[slot]:
                insort(self._keys, (slot_key(slot) + b"\0", slot))
        self.pending += requests

    def ask(
        self, worker: "Worker", shares: list[Share], own: dict[bytes, int], want: int
    ) -> Counter[str]:
        """Give a worker requests, round-robin by slot from where it has stopped."""
        now = worker.world.now
        self.members = [each for each in self.members if each.asked_at >= now - SILENT_SECS]
        worker.asked_at = now
        if worker not in self.members:
            self.members.append(worker)
        cursor = worker.cursor
        later = [each._replace(first=max(each.first, cursor)) for each in shares]
        earlier = [each._replace(last=min(each.last, cursor)) for each in shares]
        taken: Counter[str] = Counter()
        for first, last, number in (*later, *earlier):
            place = bisect_left(self._keys, (first, ""))
            while want > 0 and place < len(self._keys) and self._keys[place][0] < last:
                slot = self._keys[place][1]
                most = own.get(slot_key(slot), number)
                while want > 0 and self.pending[slot] and worker.held(slot) + taken[slot] < most:
                    taken[slot] += 1
                    self.pending[slot] -= 1
                    worker.cursor, want = slot_key(slot) + b"\1", want - 1
                if self.pending[slot]:
                    place += 1
                else:
                    del self._keys[place]
        return taken


class Worker:
    """A worker with the shipped shares."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.shares = Shares(world.limits)
        self.cursor = b""
        self.asked_at = self.asks_at = 0.0
        self.begun = 0
        self.ready: Counter[str] = Counter()
        self.running: Counter[str] = Counter()
        self.is_waiting = self.is_leaving = self.is_gone = False
        self.ask(0.0)

    def held(self, slot: str) -> int:
        return self.ready[slot] + self.running[slot]

    def ask(self, secs: float) -> None:
        """Ask after some time, unless it asks before."""
        at = self.world.now + secs
        self.asks_at = at

        def ask() -> None:
            if at == self.asks_at and not (self.is_waiting or self.is_gone or self.is_leaving):
                self._ask()

        self.world.call(secs, ask)

    def _ask(self) -> None:
        world, self.is_waiting = self.world, True
        want = max(0, PREFETCH - self.ready.total())
        ranges, own = self.shares.ranges(world.now)

        def answer() -> None:
            taken = world.server.ask(self, ranges, own, want)
            members = world.server.members
            membership = Membership(len(members), members.index(self))
            world.call(world.latency(), lambda: handle(taken, membership))

        def handle(taken: Counter[str], membership: Membership) -> None:
            self.is_waiting = False
            if self.is_gone:
                world.server.put(taken)  # in Redis, when its lease has expired
                return
            self.ready += taken
            if self.shares.change(membership, world.now):
                self._return_excess()
            self.hand_out()
            self.ask(LOOK_SECS if want > taken.total() else ASK_SECS if want == 0 else 0.003)

        world.call(world.latency(), answer)

    def _return_excess(self) -> None:
        for slot, number in [*self.ready.items()]:
            room = max(0, self.shares.of(slot, self.world.now) - self.running[slot])
            if number > room:
                self.world.server.put(Counter({slot: number - room}))
                self.ready[slot] = room

    def hand_out(self) -> None:
        world = self.world
        for slot in [*+self.ready]:
            while (
                self.ready[slot]
                and self.running.total() < DOWNLOADS
                and self.running[slot] < self.shares.of(slot, world.now)
                and not self.is_leaving
            ):
                self.ready[slot] -= 1
                self.running[slot] += 1
                self.begun += 1
                world.check_limit(slot)
                world.call(world.dice.uniform(0.05, 2.0), lambda slot=slot: self._end(slot))

    def _end(self, slot: str) -> None:
        if not self.is_gone:
            self.running[slot] -= 1
            self.world.done += 1
            self.hand_out()
            self.ask(0.003)
            if self.is_leaving and not self.running.total():
                self.end()

    def can_take(self) -> bool:
        """Whether it does nothing, although there are requests for one of its shares."""
        if self.ready.total() or self.running.total() or self.is_leaving or self.is_gone:
            return False
        pending = +self.world.server.pending
        return any(self.shares.of(slot, self.world.now) for slot in pending)

    def end(self) -> None:
        """End it: after it has left, or by a kill."""
        self.is_gone = True
        server = self.world.server
        if self.is_leaving:
            server.members = [each for each in server.members if each is not self]
        server.put(self.ready)
        if not self.is_leaving:  # in Redis, when its lease has expired
            server.put(self.running)
        self.ready, self.running = Counter(), Counter()
        self.world.workers.remove(self)


class World:
    """Workers that crawl hosts, with a limit."""

    def __init__(self, hosts: int, requests: int, limits: Limits, dice: random.Random) -> None:
        self.dice = dice
        self.limits = limits
        self.now = 0.0
        self.done = 0
        self.server = Server(NAMES[:hosts], requests, dice)
        self.workers: list[Worker] = []
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._number = itertools.count()

    def latency(self) -> float:
        return self.dice.uniform(0.001, 0.05)

    def call(self, secs: float, function: Callable[[], object]) -> None:
        heapq.heappush(self._events, (self.now + secs, next(self._number), function))

    def join(self) -> None:
        self.workers.append(Worker(self))

    def check_limit(self, slot: str) -> None:
        """Check that no workers may begin more than the limit: what runs longer is older."""
        limit = self.limits.slots.get(slot, self.limits.usual)
        shares = [each.shares.of(slot, self.now) for each in self.workers]
        assert limit.delay or sum(shares) <= limit.concurrency, f"{slot}: {shares}"
        assert not limit.delay or sum(map(bool, shares)) <= 1, f"{slot}: {shares}"

    def check_work(self) -> None:
        """Check that no worker is idle for long while it has a share with pending requests."""
        idle = {each: each.begun for each in self.workers if each.can_take()}
        self.run(self.now + 3 * LOOK_SECS)
        assert not [each for each, begun in idle.items() if each.can_take() and each.begun == begun]

    def run(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            self.now, _, function = heapq.heappop(self._events)
            function()
        self.now = until


@pytest.mark.parametrize("limit", [Limit(1), Limit(8), Limit(8, delay=2.0)])
@pytest.mark.parametrize(("hosts", "requests"), [(1, 50), (16, 500), (200, 2000), (20_000, 2000)])
def test_workers_that_come_and_go_keep_to_the_limits(
    limit: Limit, hosts: int, requests: int
) -> None:
    dice = random.Random(hosts)
    world = World(hosts, requests, Limits(limit, {NAMES[0]: Limit(2)}), dice)
    for _ in range(dice.randint(1, 50)):
        world.join()
    for _ in range(12):
        world.run(world.now + dice.choice([0.02, 0.3, 1.2, 5.0]))
        worker = dice.choice(world.workers) if len(world.workers) > 1 else None
        match dice.choice(["joins", "leaves", "is killed"]), worker:
            case "leaves", Worker() as worker:
                worker.is_leaving = True
                if not worker.running.total():
                    worker.end()
            case "is killed", Worker() as worker:
                worker.end()
            case _:
                world.join()
        world.check_work()
    while world.server.pending.total() and world.now < 2000.0:
        world.run(world.now + 5.0)
        world.check_work()
    assert not world.server.pending.total()
