"""Shares of the limits of hosts: how they are divided, and workers that come and go."""

import heapq
import itertools
import random
import statistics
from collections.abc import Callable

import pytest

from scrapy_bloom.queues.shares import NO_MEMBER, Limit, Limits, Membership, Shares
from scrapy_bloom.queues.store import slot_key
from tests.support.crawls import ROOT

NAMES = [f"www.shop-{number}.example" for number in range(500)]
LIMITS = [Limit(1), Limit(8), Limit(1000), Limit(8, delay=2.0), Limit(0, delay=0.5)]


def hash_of(slot: str) -> int:
    return int.from_bytes(slot_key(slot)[:4], "big")


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("workers", [1, 2, 7, 50])
def test_the_shares_of_all_workers_are_the_limit(limit: Limit, workers: int) -> None:
    members = [Membership(workers, rank) for rank in range(workers)]
    for slot in NAMES[:200]:
        shares = [member.share(limit, hash_of(slot)) for member in members]
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
        ranges = shares.ranges(now)
        assert ranges == sorted(ranges)
        for slot in [*NAMES[:50], *special]:
            member = slot_key(slot) + b"\0"
            found = [
                each_range.number
                for each_range in ranges
                if each_range.first <= member < each_range.last
            ]
            assert sum(found) == shares.of(slot, now)
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


# Workers that come and go.

ASK_SECS, LATENCY_SECS = 0.5, 0.05  # at most, of a worker that runs
SILENT_SECS = 30.0


class Crowd:
    """Workers with the shipped shares, and the server that tells them their memberships."""

    def __init__(self, limits: Limits, dice: random.Random) -> None:
        self.limits, self.dice, self.now = limits, dice, 0.0
        self.members: list[Shares] = []  # as the server knows them
        self.workers: list[Shares] = []  # that may begin downloads
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._number = itertools.count()

    def call(self, secs: float, function: Callable[[], object]) -> None:
        heapq.heappush(self._events, (self.now + secs, next(self._number), function))

    def join(self) -> None:
        self.workers.append(Shares(self.limits))
        self._ask(self.workers[-1])

    def end(self, *, is_killed: bool) -> None:
        """End a worker; the server learns that at once, or when it has been silent for long."""
        worker = self.workers.pop(self.dice.randrange(len(self.workers)))
        if worker in self.members:
            self.call(SILENT_SECS * is_killed, lambda: self.members.remove(worker))

    def _ask(self, worker: Shares) -> None:
        def answer() -> None:
            if worker not in self.workers:
                return
            if worker not in self.members:
                self.members.append(worker)
            membership = Membership(len(self.members), self.members.index(worker))
            self.call(self.dice.uniform(0.001, LATENCY_SECS), lambda: hear(membership))

        def hear(membership: Membership) -> None:
            worker.change(membership, self.now)
            self.call(self.dice.uniform(0.003, ASK_SECS), lambda: self._ask(worker))

        self.call(self.dice.uniform(0.001, LATENCY_SECS), answer)

    def run(self, secs: float) -> None:
        until = self.now + secs
        while self._events and self._events[0][0] <= until:
            self.now, _, function = heapq.heappop(self._events)
            function()
            for slot in NAMES[:5]:
                self.check_limit(slot)
        self.now = until

    def check_limit(self, slot: str) -> None:
        limit = self.limits.slots.get(slot, self.limits.usual)
        shares = [worker.of(slot, self.now) for worker in self.workers]
        assert limit.delay or sum(shares) <= limit.concurrency, f"{slot}: {shares}"
        assert not limit.delay or sum(map(bool, shares)) <= 1, f"{slot}: {shares}"


@pytest.mark.parametrize("limit", [Limit(1), Limit(8), Limit(8, delay=2.0)])
@pytest.mark.parametrize("most", [6, pytest.param(30, marks=pytest.mark.soak)])
def test_workers_that_come_and_go_keep_to_the_limits(limit: Limit, most: int) -> None:
    """At each moment; when all know of each other, the shares are the limit again."""
    dice = random.Random(most)
    crowd = Crowd(Limits(limit, {NAMES[0]: Limit(2)}), dice)
    for _ in range(most):
        crowd.join()
    for _ in range(20):
        crowd.run(dice.choice([0.02, 0.3, 1.2, 5.0]))
        if len(crowd.workers) > 1 and dice.random() < 0.6:
            crowd.end(is_killed=dice.random() < 0.5)
        else:
            crowd.join()
    crowd.run(SILENT_SECS + 5.0)
    for slot in NAMES[:5]:
        most = crowd.limits.slots.get(slot, limit).concurrency
        assert sum(worker.of(slot, crowd.now) for worker in crowd.workers) == most
