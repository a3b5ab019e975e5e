"""When downloads that fail without a response mean that the network is lost."""

import pytest

from scrapy_bloom.crawl.scheduler.in_flight import LEAST_SECS, MOST_UNREACHABLE, Reachability
from tests.support.clock import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def downloads(clock: Clock) -> Reachability:
    return Reachability(clock)


def fail(downloads: Reachability, *slots: str) -> None:
    """Have as many downloads fail as are too many, from these slots in turn."""
    for number in range(MOST_UNREACHABLE):
        downloads.add_failure(slots[number % len(slots)])


DEAD = [f"dead-{number}.example" for number in range(MOST_UNREACHABLE)]


def test_a_minute_has_to_pass(downloads: Reachability, clock: Clock) -> None:
    """From the beginning, and from each response."""
    fail(downloads, *DEAD)
    clock.now += LEAST_SECS - 1
    assert not downloads.is_lost
    clock.now += 1
    assert downloads.is_lost
    downloads.add_response("shop.example")
    fail(downloads, "shop.example")
    clock.now += LEAST_SECS - 1
    assert not downloads.is_lost
    clock.now += 1
    assert downloads.is_lost


def test_dead_hosts_while_others_have_answered(downloads: Reachability, clock: Clock) -> None:
    downloads.add_response("shop.example")
    for _ in range(3):
        fail(downloads, *DEAD)
        clock.now += LEAST_SECS
        assert not downloads.is_lost
    # One that had answered is among the last 200 failures, and then no more.
    downloads.add_failure("shop.example")
    assert downloads.is_lost
    fail(downloads, *DEAD)
    assert not downloads.is_lost


def test_a_response_between_failures(downloads: Reachability, clock: Clock) -> None:
    for _ in range(5):
        for _ in range(MOST_UNREACHABLE - 1):
            downloads.add_failure("shop.example")
        clock.now += LEAST_SECS
        assert not downloads.is_lost
        downloads.add_response("shop.example")
    clock.now += LEAST_SECS
    assert not downloads.is_lost
