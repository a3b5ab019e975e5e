"""A shared queue on a server that loses it, in whole or in part."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest

import servers
from redis_filters import messages
from request_queues import InRedis, name_of, names, push
from scrapy_bloom import StorageError
from scrapy_bloom.exceptions import OutageError
from scrapy_bloom.queues.batch import deserialized
from scrapy_bloom.queues.redis import SharedRequests

INFO = logging.INFO
LOST = "has lost the queue of 'shop:bloom', and not the filter: .* `scrapy bloom reset "


@pytest.fixture(autouse=True)
def _all_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(INFO)


@pytest.fixture
def own(server: servers.Server) -> Iterator[InRedis]:
    """A queue on a server of its own."""
    store = InRedis("valkey", "shop:bloom", url=server.url)
    yield store
    store.end()


def set_back(server: servers.Server) -> None:
    """Restart it as it was when it was told to save its state."""
    server.kill()
    server.start()


def drained(*workers: SharedRequests) -> list[str]:
    """All that the workers can take, in turn, and is done; in the order of names."""
    found: list[str] = []
    idle = 0
    while idle < 3:  # the last word may be that something is pending again
        some = []
        for worker in workers:
            worker._look_again = 0.0
            if taken := worker.take():
                some.append(name_of(taken))
                worker.done(taken.id)
        idle = 0 if some else idle + 1
        found += some
    return sorted(found)


def test_all_is_lost(
    own: InRedis, server: servers.Server, caplog: pytest.LogCaptureFixture
) -> None:
    """Also the filter: the crawl starts anew, in a new queue."""
    workers = [own.open() for _ in range(2)]
    assert workers[0].claim_start()
    workers[0].end_start(workers[0].id, is_through=True)
    for name in "abc":
        push(workers[0], name)
    taken = workers[0].take()
    before = workers[0].id
    server.client.flushall()
    assert drained(workers[1]) == []
    assert workers[1].can_start
    assert workers[1].id != before
    push(workers[0], "d")
    assert workers[0].id == workers[1].id
    workers[0].done(taken.id)
    assert workers[1].claim_start()
    workers[1].end_start(workers[1].id, is_through=True)
    assert drained(*workers) == ["d"]
    assert workers[0].ended_at
    assert [line.count("was lost by the server") for line in messages(caplog, INFO)] == [1, 1]


@pytest.mark.parametrize("step", ["push", "take", "set_aside", "close", "join"])
def test_the_queue_is_lost_and_the_filter_is_not(
    step: str, own: InRedis, server: servers.Server
) -> None:
    server.client.hset(own.key, "filter", "1")
    worker = own.open()
    assert server.client.hget(own.key, "queue") == worker.id
    for name in "abc":
        push(worker, name)
    taken = worker.take()
    server.client.delete(*own.keys[:4])
    if step == "close":  # nothing to be said: the crawl has told, or the next one will
        worker.close()
    elif step == "set_aside":
        worker.set_aside(taken.id)
    else:
        steps: dict[str, Any] = {
            "push": lambda: push(worker, "d"),
            "take": worker.take,
            "join": own.open,
        }
        with pytest.raises(StorageError, match=LOST):
            steps[step]()
    with pytest.raises(StorageError, match=LOST):
        own.open()
    assert server.client.keys() == [own.key.encode()]


def test_a_filter_that_comes_later_is_marked(own: InRedis, server: servers.Server) -> None:
    """The queue is opened before the filter is made: the lease has it marked."""
    worker = own.open(lease_secs=1)
    server.client.hset(own.key, "filter", "1")
    servers.wait_for(
        lambda: server.client.hget(own.key, "queue") == worker.id, lambda: "it is not marked"
    )


def test_a_server_that_is_set_back_gets_what_it_has_lost(
    own: InRedis, server: servers.Server, caplog: pytest.LogCaptureFixture
) -> None:
    workers = [own.open() for _ in range(2)]
    recorded: list[bytes] = []
    for worker in workers:
        worker._record = recorded.append
    assert workers[0].claim_start()
    for number in range(4):
        push(workers[number % 2], f"old {number}")
    server.client.save()
    workers[0].end_start(workers[0].id, is_through=True)
    for number in range(4):
        push(workers[number % 2], f"new {number}")
    set_back(server)
    assert not own.state().is_started
    workers[0].end_start(workers[0].id, is_through=True)
    expected = sorted([f"old {n}" for n in range(4)] + [f"new {n}" for n in range(4)])
    assert drained(*workers) == expected
    assert {deserialized(each)["name"] for each in recorded} == {f"new {n}" for n in range(4)}
    assert workers[0].ended_at
    assert len([line for line in messages(caplog, INFO) if "2 requests are pending" in line]) == 2


def test_leases_that_nobody_holds_any_more_are_given_back(
    own: InRedis, server: servers.Server
) -> None:
    """What was in flight when the state was saved, and is done since, is crawled once more."""
    workers = [own.open(prefetch=2) for _ in range(2)]
    for number in range(8):
        push(workers[0], str(number), newest_first=False)
    taken = [worker.take() for worker in workers]
    server.client.save()
    for worker, each in zip(workers, taken, strict=True):
        worker.done(each.id)
    assert drained(*workers) == ["1", "3", "4", "5", "6", "7"]
    set_back(server)
    assert drained(*workers) == [str(number) for number in range(8)]
    assert own.counts() == (0, 0)


def test_a_worker_that_is_younger_than_the_state(own: InRedis, server: servers.Server) -> None:
    old = own.open()
    push(old, "old")
    server.client.save()
    young = own.open()
    push(young, "young")
    assert names(young, 1) == ["young"]
    push(young, "younger")
    set_back(server)
    assert drained(young) == ["old", "young", "younger"]
    assert drained(old) == []
    assert len(own.state().workers) == 2


def test_an_older_state_in_which_the_crawl_was_not_over(
    own: InRedis, server: servers.Server
) -> None:
    workers = [own.open() for _ in range(2)]
    assert workers[0].claim_start()
    push(workers[0], "a")
    workers[0].end_start(workers[0].id, is_through=True)
    server.client.save()
    assert drained(*workers) == ["a"]
    assert workers[1].ended_at
    set_back(server)
    assert drained(*workers) == ["a"]
    assert workers[0].ended_at
    assert workers[1].ended_at


def test_after_an_outage_it_goes_on(own: InRedis, server: servers.Server) -> None:
    """What was not told to the server is told then; a push that has failed may be stored or not."""
    server.client.config_set("appendonly", "yes")
    server.client.config_set("appendfsync", "always")
    worker = own.open(deadline_secs=0.3)
    push(worker, "a", newest_first=False)
    push(worker, "b", newest_first=False)
    first = worker.take()
    worker.done(first.id)
    servers.wait_for(
        lambda: not server.client.info("persistence")["aof_rewrite_in_progress"],
        lambda: "no appendonly",
    )
    server.kill()
    for step in (worker.take, lambda: push(worker, "c", newest_first=False)):
        with pytest.raises(OutageError):
            step()
    server._options += ["--appendonly", "yes"]
    server.start()
    servers.wait_for(lambda: _is_back(worker), lambda: "it is not tried again")
    push(worker, "d", newest_first=False)
    assert drained(worker) in (["b", "d"], ["b", "c", "d"])  # the failed push
    assert own.counts() == (0, 0)
    worker.close()


def _is_back(worker: SharedRequests) -> bool:
    try:
        return bool(worker._server.send("PING"))
    except OutageError:
        return False
