"""What only a shared queue has: workers, leases, lost replies, suspects, the end of a crawl."""

import os
import signal
import socket
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scrapy_bloom.queues.redis_store import RedisStore
from scrapy_bloom.queues.serialized import deserialized, serialized
from scrapy_bloom.queues.shares import Limit, Limits, Membership, Shares
from scrapy_bloom.queues.store import (
    Batch,
    Ended,
    Entered,
    Joining,
    RejoinedError,
    State,
)
from scrapy_bloom.redis.lua_scripts import script
from tests.support import servers
from tests.support.crawls import run_script
from tests.support.proxies import DroppingProxy
from tests.support.redis_filters import PLACES
from tests.support.request_queues import (
    SHOP,
    InRedis,
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


def started(worker: RedisStore) -> None:
    """Have a worker run the spider's start(), which yields nothing."""
    worker.apply(Batch(may_start=True))
    worker.apply(Batch(start_ended=True))


# Every kind of server.


@pytest.mark.parametrize("place", PLACES)
def test_each_kind_of_server_keeps_what_killed_workers_had(place: str, tmp_path: Path) -> None:
    """Each change is stored before the call returns; all scripts run on each of the servers."""
    script = """
        import os, signal, sys
        from scrapy_bloom.queues.store import Joining
        from tests.support.request_queues import *
        place, key, url = sys.argv[1:]
        store = InRedis(place, key, url=url).open(Joining("shop", "monday"))
        for number in range(60):
            enter(store, page(str(number), slot="ab"[number % 2], newest_first=False))
        requests = [taken(store) for _ in range(10)]
        done(store, requests[0])
        failed(store, requests[1])
        unreadable(store, requests[2])
        os.kill(os.getpid(), signal.SIGKILL)
    """
    shared = InRedis(place, str(tmp_path))
    ended = run_script(script, place, shared.key, shared.url, cwd=tmp_path)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert shared.counts() == (50, 7)
    shared.lapse_all()
    store = shared.open(Joining("shop", "tuesday"))
    reply = store.apply(Batch())
    assert (reply.pending, list(reply.expired.values())) == (59, [7])
    assert sorted(map(int, names(store, 99))) == list(range(1, 60))
    store.close()
    assert shared.queue().slots() == {"a": 29, "b": 30}
    assert shared.queue().move(State.PENDING, None, "a") == 29
    assert shared.counts() == (30, 0)
    shared.end()


# Several workers.


def test_more_is_given_back_than_one_script_may_move(shared: InRedis) -> None:
    worker = shared.open()
    enter(worker, *(Entered(serialized({"name": str(n)})) for n in range(500)))
    while worker.apply(Batch(want=100)).taken:
        pass
    assert shared.counts() == (0, 500)
    worker.close()
    assert shared.counts() == (500, 0)


# Replies that are lost.


class OneReplyLost(DroppingProxy):
    """Drops the next reply to a script, once a test has chosen it."""

    def __init__(self, port_of_server: int) -> None:
        self._next = b""
        super().__init__(port_of_server, 0.0, 0)

    def lose(self, script: str, server: servers.Server) -> None:
        server.client.script_flush()  # so that the whole script is sent, and can be known
        self._next = script[-200:].encode()

    def _drops(self, asked: bytes) -> bool:
        if not self._next or self._next not in asked:
            return False
        self._next = b""
        self.dropped += 1
        return True


def test_each_script_may_lose_its_reply(shared: InRedis, server: servers.Server) -> None:
    """What is sent again has the same effect, once."""
    proxy = OneReplyLost(server.port)
    own = InRedis("valkey", "k", url=f"redis://127.0.0.1:{proxy.port}/0")

    def lost(script: str, step: Callable[[], Any]) -> Any:
        before = proxy.dropped
        proxy.lose(script, server)
        answer = step()
        assert proxy.dropped == before + 1
        return answer

    worker = own.make()
    opened = lost(script("join"), lambda: worker.open(Joining("shop", "monday")))
    assert (opened.began, opened.is_first, opened.others) == (True, True, 0)
    assert len(own.state().workers) == 1
    for name in "abcd":
        lost(script("batch"), lambda name=name: push(worker, name, newest_first=False))
    assert own.counts() == (4, 0)
    reply = lost(script("batch"), lambda: worker.apply(Batch(want=2, may_start=True)))
    assert [name_of(entry) for entry in reply.taken] == ["a", "b"]
    assert reply.runs_start
    assert own.counts() == (2, 2)
    link = page("link", newest_first=False)
    reply = lost(
        script("batch"), lambda: worker.apply(Batch([link], ended=[Ended(reply.taken[0].id)]))
    )
    assert (reply.queued, reply.added) == ([True], 1)
    assert (reply.unfinished, own.state().done) == (4, 1)
    answers = lost(script("batch"), lambda: enter(worker, link, request("e", priority=1), link))
    assert answers == [False, True, False]
    assert name_of(lost(script("batch"), lambda: taken(worker))) == "e"
    third = lost(script("batch"), lambda: taken(worker))
    lost(script("batch"), lambda: unreadable(worker, third))
    fourth = lost(script("batch"), lambda: taken(worker))
    lost(script("batch"), lambda: failed(worker, fourth))
    assert own.counts() == (1, 2)
    lost(script("leave"), worker.close)
    assert own.counts() == (3, 0)
    worker = own.make()
    lost(script("move"), lambda: worker.open(Joining("shop", "monday")))
    lost(script("move"), lambda: own.queue().move(State.FAILED, State.PENDING))
    assert sorted(names(worker, 5)) == ["b", "c", "d", "e", "link"]
    own.end()
    proxy.end()


# Leases.


def test_what_a_dead_worker_had_is_for_the_others(shared: InRedis) -> None:
    dead, *others = (shared.open() for _ in range(3))
    for number in range(5):
        push(dead, str(number), newest_first=False)
    assert names(dead, 2) == ["0", "1"]
    assert [names(other, 1) for other in others] == [["2"], ["3"]]
    shared.lapse(dead)
    reply = others[0].apply(Batch(want=1))
    assert reply.expired == {f"{socket.gethostname()}:{os.getpid()}": 2}
    assert [name_of(entry) for entry in reply.taken] == ["0"]
    assert not others[1].apply(Batch()).expired
    assert names(others[1], 9) == ["1", "4"]
    assert sorted(worker.in_flight for worker in shared.state().workers) == [2, 3]


def test_a_lease_that_ends_by_itself(shared: InRedis) -> None:
    """With the server's clock, and nothing but the time."""
    stopped, other = (shared.make(lease_secs=0.5) for _ in range(2))
    stopped.open(SHOP)
    push(stopped, "a")
    request = taken(stopped)
    other.open(SHOP)
    found: list[Any] = []
    servers.wait_for(lambda: bool(found.append(take(other)) or found[-1]), lambda: "not taken")
    assert name_of(found[-1]) == "a"
    with pytest.raises(RejoinedError, match="has no lease of this worker"):
        done(stopped, request)
    done(stopped, request)  # it goes on as another worker, to whom this token says nothing
    assert take(stopped) is None
    assert shared.state().done == 0
    done(other, found[-1])
    assert shared.state().done == 1


def test_each_batch_renews_the_lease(shared: InRedis) -> None:
    worker, other = shared.open(), shared.open()
    push(worker, "a")
    assert names(worker, 1) == ["a"]
    shared.server.send("HINCRBY", shared.keys["workers"], worker.worker, -500_000)
    worker.apply(Batch())
    until = int(shared.server.send("HGET", shared.keys["workers"], worker.worker))
    assert until > 1000 * (shared.server.now() + 500)
    assert take(other) is None
    assert shared.counts() == (0, 1)


def test_leases_that_are_over_all_at_once_are_renewed_first(shared: InRedis) -> None:
    """As when the server was away for long: nobody is dead."""
    workers = [shared.open() for _ in range(2)]
    push(workers[0], "a")
    push(workers[0], "b")
    requests = [taken(worker) for worker in workers]
    for worker in workers:
        shared.lapse(worker)
    for worker in workers:
        assert take(worker) is None
    for worker, found in zip(workers, requests, strict=True):
        done(worker, found)
    assert shared.state().done == 2


def test_a_worker_that_joins_at_the_end_of_an_outage_spares_the_others(shared: InRedis) -> None:
    worker = shared.open()
    push(worker, "a")
    request = taken(worker)
    shared.lapse(worker)
    shared.server.send("HSET", shared.key, "look", 1)
    assert take(shared.open()) is None
    done(worker, request)
    assert shared.state().done == 1


def test_no_lease_lies_further_ahead_than_it_lasts(shared: InRedis) -> None:
    """As after the server's clock went back."""
    dead, other = shared.open(), shared.open()
    shared.server.send("HSET", shared.keys["workers"], dead.worker, 10**15)
    shared.server.send("HDEL", shared.key, "look")
    other.apply(Batch())
    until = int(shared.server.send("HGET", shared.keys["workers"], dead.worker))
    assert until < 1000 * (shared.server.now() + 601)


# Shares of the limits of slots.


def asked(worker: RedisStore, **options: Any) -> tuple[int, int]:
    """How many workers take requests, and its rank among them."""
    reply = worker.apply(Batch(want=1, **options))
    return reply.workers, reply.rank


def test_workers_that_ask_for_requests_are_counted(shared: InRedis) -> None:
    """As long as they ask; a command adds requests, and asks for none."""
    add, *workers = (shared.open() for _ in range(4))
    push(add, "page")
    assert [asked(worker) for worker in workers] == [(1, 0), (2, 1), (3, 2)]
    reply = add.apply(Batch())
    assert (reply.workers, reply.rank) == (3, -1)
    workers[0].close()
    assert [asked(worker) for worker in workers[1:]] == [(2, 0), (2, 1)]
    silent, busy = workers[1:]
    field = f"{silent.worker.decode()}:asked"
    now = 1000 * shared.server.now()
    for secs, number in ((29, 2), (31, 1)):
        shared.server.send("HSET", shared.keys["workers"], field, round(now - 1000 * secs))
        shared.server.send("HDEL", shared.key, "look")
        assert asked(busy) == (number, number - 1)
    reply = silent.apply(Batch())  # a heartbeat
    assert (reply.workers, reply.rank) == (1, -1)
    assert asked(silent) == (2, 1)


@pytest.mark.parametrize("limit", [Limit(1), Limit(5), Limit(8, delay=1.0), Limit()])
def test_each_worker_takes_its_shares(limit: Limit, shared: InRedis) -> None:
    slots, each_has = [f"{number}.example" for number in range(30)], 9
    special = {slots[0]: Limit(2), slots[1]: Limit(6, delay=0.1), slots[2]: Limit(0), "none": limit}
    limits = Limits(limit, special)
    workers = [shared.open() for _ in range(3)]
    for number in range(each_has):
        enter(workers[0], *(request(f"{slot} {number}", slot=slot) for slot in slots))
    held: list[Counter[str]] = []
    for rank, worker in enumerate(workers):
        shares, numbers = Shares(limits), Counter[str]()
        shares.change(Membership(1, 0), 0.0)
        shares.change(Membership(3, rank), 0.0)
        held.append(numbers)
        for _ in range(30):
            batch = Batch(want=16, downloads=numbers, shares=shares.ranges(9.0))
            numbers.update(request.slot for request in worker.apply(batch).taken)
        for slot in slots:
            others = sum(other[slot] for other in held[:-1])
            assert numbers[slot] == min(shares.of(slot, 9.0), each_has - others), slot
    for slot in slots:
        most = special.get(slot, limit).concurrency or each_has
        assert sum(numbers[slot] for numbers in held) == min(most, each_has)


# Requests that seem to kill their workers.


def die_of(shared: InRedis, times: int, watching: RedisStore, want: int = 1) -> list[str]:
    """Have workers take a request each, and die; the names of those that are dead letters then."""
    dead: list[bytes] = []
    for _ in range(times):
        worker = shared.open()
        assert len(worker.apply(Batch(want=want)).taken) == want
        shared.lapse(worker)
        dead += watching.apply(Batch()).died
    return [deserialized(entry)["name"] for entry in dead]


def test_a_worker_that_comes_back_takes_the_blame_away(shared: InRedis) -> None:
    watching, stopped = shared.open(), shared.open()
    push(watching, "page")
    assert names(stopped, 1) == ["page"]
    shared.lapse(stopped)
    watching.apply(Batch())
    assert die_of(shared, 2, watching) == []
    assert shared.state().counts[State.SUSPECT] == 1
    with pytest.raises(RejoinedError):
        stopped.apply(Batch())
    reply = stopped.apply(Batch(want=1))
    reply = stopped.apply(Batch(want=1)) if not reply.taken else reply
    assert [name_of(entry) for entry in reply.taken] == ["page"]
    shared.lapse(stopped)
    assert not watching.apply(Batch()).died


def test_a_dead_letter_comes_back_with_the_worker_that_had_it(shared: InRedis) -> None:
    watching, stopped = shared.open(), shared.open()
    push(watching, "page")
    die_of(shared, 3, watching)
    assert names(stopped, 1) == ["page"]
    shared.lapse(stopped)
    assert watching.apply(Batch()).died
    with pytest.raises(RejoinedError):
        stopped.apply(Batch())
    state = shared.state()
    assert (state.counts[State.SUSPECT], state.counts[State.DEAD]) == (1, 0)


# Fields of workers that are gone.


def fields(shared: InRedis) -> set[bytes]:
    return {
        name.partition(b":")[0] for name in shared.server.send("HGETALL", shared.keys["workers"])
    }


def test_fields_of_killed_workers_are_removed_after_an_hour(shared: InRedis) -> None:
    watching = shared.open()
    killed = [shared.open() for _ in range(20)]
    shared.queue().stop([killed[0].worker.decode()])
    for number, worker in enumerate(killed):
        push(worker, str(number), priority=number)
        assert names(worker, 1) == [str(number)]
        shared.lapse(worker)
        watching.apply(Batch())
    gone = {worker.worker for worker in killed}
    assert gone <= fields(shared)  # they may come back
    for worker in killed[:10]:
        name = worker.worker + b":number"
        number = shared.server.send("HGET", shared.keys["workers"], name)
        earlier = int(number.split()[-1]) - 3_700_000
        shared.server.send("HSET", shared.keys["workers"], name, f"gone 1 {earlier}")
    shared.server.send("HDEL", shared.key, "look")
    watching.apply(Batch())
    assert fields(shared) == {watching.worker, *(worker.worker for worker in killed[10:])}
    with pytest.raises(RejoinedError):
        killed[0].apply(Batch())
    with pytest.raises(RejoinedError):
        killed[15].apply(Batch())


def test_a_worker_that_is_stopped_after_its_lease_has_expired(shared: InRedis) -> None:
    """`scrapy bloom stop` does not wait for it, because it may have been killed."""
    worker, other = shared.open(), shared.open()
    shared.queue().stop([worker.worker.decode()])
    shared.lapse(worker)
    assert other.apply(Batch()).expired
    with pytest.raises(RejoinedError):
        worker.apply(Batch())
    assert worker.apply(Batch()).is_stopped


def test_a_suspended_worker_sends_nothing_again(shared: InRedis) -> None:
    """Even if all others have left, the queue knows which of its batches were applied."""
    suspended, other = shared.open(), shared.open()
    enter(suspended, request("a")._replace(has_parent=False))
    done(suspended, taken(suspended))
    shared.lapse(suspended)
    other.apply(Batch())
    other.close()
    with pytest.raises(RejoinedError) as caught:
        suspended.apply(Batch())
    assert caught.value.lost == []


def test_workers_with_one_name_are_two(shared: InRedis) -> None:
    """As in containers, where the process has the same number, and maybe the same host name."""
    workers = [shared.open() for _ in range(2)]
    one, other = shared.state().workers
    assert one.name == other.name
    shared.queue().stop([workers[0].worker.decode()])
    assert [worker.apply(Batch()).is_stopped for worker in workers] == [True, False]


# Runs.


def test_another_run_retires_the_workers_of_the_last_one(shared: InRedis) -> None:
    old = shared.open(Joining("shop", "monday"))
    push(old, "a", newest_first=False)
    push(old, "b", newest_first=False)
    push(old, "taken", priority=1)
    old.apply(Batch(may_start=True))
    assert names(old, 1) == ["taken"]
    in_flight = taken(old)
    new = shared.make()
    opened = new.open(Joining("shop", "tuesday"))
    assert (opened.began, opened.others) == (True, 1)
    assert new.apply(Batch(may_start=True)).runs_start
    start = page("start", once=True)
    reply = old.apply(Batch([start], ended=[Ended(in_flight.id)], want=5, may_start=True))
    assert (reply.is_retired, reply.taken, reply.queued) == (True, [], [True])
    assert not reply.runs_start
    assert old.run == new.run
    assert enter(new, start) == [False]  # what the other has found counts for this run
    reply = old.apply(Batch(want=5, start_ended=True, is_over=True))
    assert (reply.is_retired, reply.taken, reply.is_started) == (True, [], False)
    assert sorted(names(new, 5)) == ["b", "start"]
    assert (old.close(), len(shared.state().workers)) == (None, 1)
    assert names(new, 5) == ["taken"]


def test_a_reply_is_lost_and_another_run_begins(shared: InRedis) -> None:
    """What the lost batch has taken is in flight, though the worker is retired now."""
    old = shared.open(Joining("shop", "monday"))
    push(old, "a")
    old.apply(batch := Batch([page("b")], want=1))
    shared.open(Joining("shop", "tuesday"))
    old._number -= 1
    reply = old.apply(batch)
    assert (reply.queued, len(reply.taken), reply.is_retired) == ([True], 1, False)
    reply = old.apply(batch)
    assert (reply.queued, reply.taken, reply.is_retired) == ([False], [], True)


def failed_page(worker: RedisStore, name: str) -> None:
    """Crawl a page, which fails."""
    enter(worker, page(name, priority=9))
    failed(worker, taken(worker))


def test_a_finished_run_tries_failed_requests_again_only_without_other_workers(
    shared: InRedis,
) -> None:
    first = shared.open()
    started(first)
    failed_page(first, "page")
    assert first.apply(Batch(is_over=True)).ended_at
    second = shared.make()
    opened = second.open(SHOP)
    assert (opened.retried, bool(opened.ended_at), opened.others) == (0, True, 1)
    assert not second.apply(Batch(want=1)).taken
    first.close()
    second.close()
    third = shared.make()
    opened = third.open(SHOP)
    assert (opened.retried, opened.ended_at, opened.counts[State.FAILED]) == (1, 0, 1)
    reply = third.apply(Batch(want=1, may_start=True))
    assert ([name_of(entry) for entry in reply.taken], reply.unfinished) == (["page"], 1)
    assert not reply.runs_start  # the run's start() has ended
    assert (reply.is_started, reply.ended_at) == (True, 0)


def test_a_command_begins_no_run(shared: InRedis) -> None:
    """Such as `scrapy bloom add`, which may be there before the first crawl, and afterwards."""
    command = shared.make()
    opened = command.open(Joining("shop", is_crawl=False))
    assert (opened.run, opened.began, opened.is_first, command.run) == ("", False, False, b"")
    start = page("start", once=True)
    assert enter(command, page("a"), start, start) == [True, True, False]
    crawl = shared.make()
    assert crawl.open(Joining("shop", "monday")).began
    reply = command.apply(Batch([page("a"), page("b")]))
    assert (reply.queued, reply.is_retired, command.run) == ([False, True], False, crawl.run)
    assert sorted(names(crawl, 9)) == ["a", "b", "start"]
    shared.server.send("DEL", shared.key)
    for _ in range(2):  # whoever finds it lost: the command begins no run then, either
        with pytest.raises(RejoinedError):
            command.apply(Batch())
        shared.server.send("DEL", shared.key)
    assert shared.make().open(Joining("shop", is_crawl=False)).run == ""
