"""Any sequence of what workers of a shared queue do, and of what becomes of them and the server."""

import hashlib
import itertools
from collections import Counter
from typing import Any

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

import servers
from proxies import DroppingProxy
from request_queues import InRedis, name_of, push
from scrapy_bloom.exceptions import OutageError
from scrapy_bloom.queues import scripts
from scrapy_bloom.queues.batch import deserialized
from scrapy_bloom.queues.members import parsed, parsed_leased
from scrapy_bloom.queues.redis import SharedRequests

STEPS = ["JOIN", "PUSH", "TAKE", "START", "STARTED", "LEAVE"]


class LossyProxy(DroppingProxy):
    """Drops the next reply to a script that it is told; or has no server behind it for a while."""

    def __init__(self, port_of_server: int) -> None:
        self.next = b""
        super().__init__(port_of_server, 0.0, 0)

    def _drops(self, asked: bytes) -> bool:
        drops = bool(self.next) and self.next in asked
        if drops:
            self.next = b""
            self.dropped += 1
        return drops


class Worker:
    """A worker, and what it has taken: names of requests by their rows."""

    def __init__(self, queue: SharedRequests) -> None:
        self.queue = queue
        self.taken: dict[Any, str] = {}
        self.finished: dict[Any, str] = {}  # what the server may not have been told of
        self.is_starting = False


class Workers(RuleBasedStateMachine):
    """Beside sets: which requests were pushed, and are gone; and how often each was taken."""

    keys = itertools.count()
    server: servers.Server
    proxy: LossyProxy

    @initialize(by_slot=st.booleans(), prefetch=st.integers(1, 4), number=st.integers(1, 3))
    def begin(self, by_slot: bool, prefetch: int, number: int) -> None:
        self.key = f"machine:{next(self.keys)}"
        self.store = InRedis("valkey", self.key, url=self.server.url)
        self.options: dict[str, Any] = {"by_slot": by_slot, "prefetch": prefetch}
        self.pushed: set[str] = set()
        self.perhaps: set[str] = set()  # of a push that has failed
        self.gone: set[str] = set()
        self.takes: Counter[str] = Counter()
        self.lost_leases = 0
        self.names = map(str, itertools.count())
        self.workers: list[Worker] = []
        for _ in range(number):
            self.join()

    # Coming and going.

    @precondition(lambda self: len(self.workers) < 4)
    @rule()
    def join(self) -> None:
        url = f"redis://127.0.0.1:{self.proxy.port}/0"
        self.workers.append(Worker(self.store.open(url=url, **self.options)))

    def chosen(self, index: int) -> Worker:
        return self.workers[index % len(self.workers)]

    @precondition(lambda self: self.workers)
    @rule(index=st.integers(0, 3))
    def leave(self, index: int) -> None:
        worker = self.workers.pop(index % len(self.workers))
        has_lease = worker.queue._worker in self.store.workers()
        worker.queue.close()
        if has_lease:
            self.note_gone(worker, [])
        self.lost_leases += bool(worker.taken)  # it gives them back

    @precondition(lambda self: self.workers)
    @rule(index=st.integers(0, 3))
    def die(self, index: int) -> None:
        worker = self.workers.pop(index % len(self.workers))
        self.store.die(worker.queue)
        self.store.bury()
        self.lost_leases += 1

    @precondition(lambda self: self.workers)
    @rule(index=st.integers(0, 3))
    def stand_still(self, index: int) -> None:
        """For longer than the lease; it does not know it yet."""
        self.store.lapse(self.chosen(index).queue)
        self.lost_leases += 1

    # Requests.

    @precondition(lambda self: self.workers)
    @rule(
        index=st.integers(0, 3),
        slot=st.sampled_from("ab"),
        priority=st.integers(-1, 1),
        newest_first=st.booleans(),
    )
    def push(self, index: int, slot: str, priority: int, newest_first: bool) -> None:
        name = next(self.names)
        options = {"slot": slot, "priority": priority, "newest_first": newest_first}
        push(self.chosen(index).queue, name, **options)
        self.pushed.add(name)

    @precondition(lambda self: self.workers)
    @rule(index=st.integers(0, 3))
    def push_and_take_back(self, index: int) -> None:
        queue = self.chosen(index).queue
        push(queue, f"never {next(self.names)}")
        queue.take_back()

    @precondition(lambda self: self.workers)
    @rule(index=st.integers(0, 3))
    def take(self, index: int) -> None:
        self.take_one(self.chosen(index))

    def take_one(self, worker: Worker) -> bool:
        worker.queue._look_again = 0.0
        taken = worker.queue.take()
        if taken is None:
            return False
        name = name_of(taken)
        assert name not in self.gone
        assert taken.id not in worker.taken, "one lease has it twice"
        worker.taken[taken.id] = name
        self.takes[name] += 1
        return True

    @precondition(lambda self: any(worker.taken for worker in self.workers))
    @rule(index=st.integers(0, 3), newest=st.booleans())
    def finish(self, index: int, newest: bool) -> None:
        worker = self.chosen(index)
        if worker.taken:
            rows = sorted(worker.taken)
            self.finish_row(worker, rows[-1 if newest else 0])

    def finish_row(self, worker: Worker, row: Any) -> None:
        worker.finished[row] = worker.taken.pop(row)
        worker.queue.done(row)

    def note_gone(self, worker: Worker, untold: list[bytes]) -> None:
        """What one lease has taken and told to be done, is not to be met again."""
        for row, name in list(worker.finished.items()):
            lease, position = row
            if lease != worker.queue._worker or position not in untold:
                del worker.finished[row]
                if lease == worker.queue._worker:
                    self.gone.add(name)

    # The spider's start().

    @precondition(lambda self: self.workers)
    @rule(index=st.integers(0, 3))
    def claim_start(self, index: int) -> None:
        worker = self.chosen(index)
        worker.is_starting = worker.queue.claim_start()

    @precondition(lambda self: any(worker.is_starting for worker in self.workers))
    @rule(is_through=st.booleans())
    def end_start(self, is_through: bool) -> None:
        for worker in self.workers:
            if worker.is_starting:
                worker.queue.end_start(worker.queue.id, is_through=is_through)
                worker.is_starting = False

    # Faults.

    @rule(step=st.sampled_from(STEPS))
    def lose_next_reply(self, step: str) -> None:
        script: str = getattr(scripts, step)
        self.proxy.next = hashlib.sha1(script.encode()).hexdigest().encode()

    @rule()
    def restart_server(self) -> None:
        """It has written down all that it has answered."""
        self.server.kill()
        self.server.start()

    @precondition(lambda self: self.workers)
    @rule(index=st.integers(0, 3), step=st.sampled_from(["push", "take"]))
    def fail_in_an_outage(self, index: int, step: str) -> None:
        worker = self.chosen(index)
        self.server.kill()
        worker.queue._server.deadline_secs = 0
        try:
            if step == "push":
                name = next(self.names)
                self.perhaps.add(name)
                push(worker.queue, name)
            else:
                self.take_one(worker)
        except OutageError:
            pass
        finally:
            self.server.start()
            worker.queue._server.deadline_secs = 10
            worker.queue._server._next_attempt = 0.0
            worker.queue._server._down_since = None

    # What holds.

    @invariant()
    def each_request_is_in_one_place(self) -> None:
        if not hasattr(self, "store"):
            return
        for worker in self.workers:
            self.note_gone(worker, worker.queue._done)
        pending, leased = self.members()
        everywhere = pending + leased
        assert max(Counter(everywhere).values(), default=1) == 1, "stored twice"
        assert not {name for name in everywhere if name.startswith("never")}
        assert self.pushed - self.gone <= set(everywhere) <= self.pushed | self.perhaps
        assert not self.gone & set(everywhere), "done twice"

    def members(self) -> tuple[list[str], list[str]]:
        """The names of those that are pending, and leased."""
        client = self.server.client
        pending = [parsed(each) for each in client.zrange(self.store.keys[0], 0, -1)]
        leased = [parsed_leased(each)[2] for each in client.zrange(self.store.keys[1], 0, -1)]
        return tuple(
            [deserialized(each.data)["name"] for each in some] for some in (pending, leased)
        )

    def teardown(self) -> None:
        """All is crawled to its end by those who are left, or by one more."""
        if not hasattr(self, "store"):
            return
        self.proxy.next = b""
        if not self.workers:
            self.join()
        for _ in range(200):
            self.store.bury()
            took = [self.take_one(worker) for worker in self.workers]
            for worker in self.workers:
                for row in list(worker.taken):
                    self.finish_row(worker, row)
                if worker.queue.can_start and worker.queue.claim_start():
                    worker.queue.end_start(worker.queue.id, is_through=True)
            if not any(took) and all(worker.queue.ended_at for worker in self.workers):
                break
        else:
            raise AssertionError(f"the crawl does not end: {self.store.state()}")
        self.each_request_is_in_one_place()
        assert self.members() == ([], [])
        assert self.pushed == self.gone - self.perhaps
        assert self.pushed <= set(self.takes) <= self.pushed | self.perhaps
        for name, takes in self.takes.items():
            assert takes <= 1 + self.lost_leases, name
        for worker in self.workers:
            worker.queue.close()
        assert not self.store.state().workers
        self.store.end()


def test_any_sequence_of_steps_and_faults() -> None:
    Workers.server = servers.Server("valkey", "--appendonly", "yes", "--appendfsync", "always")
    Workers.proxy = LossyProxy(Workers.server.port)
    try:
        run_state_machine_as_test(
            Workers,
            settings=settings(max_examples=15, stateful_step_count=40),
        )
    finally:
        Workers.proxy.end()
        Workers.server.end()
