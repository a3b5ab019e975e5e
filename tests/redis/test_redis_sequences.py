"""Any sequence of uses of a shared filter, compared with a dict."""

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
    run_state_machine_as_test,
)

from scrapy_bloom.redis.backend import RedisBackend
from tests.support import servers
from tests.support.clock import Clock
from tests.support.redis_filters import opened


class CrawlersAgainstDict(RuleBasedStateMachine):
    """Three crawlers on one filter, in any order, compared with a dict of recording times."""

    keys = itertools.count()

    @initialize(window=st.sampled_from([0, 1000]), mirrors=st.lists(st.booleans(), min_size=3))
    def start(self, window: int, mirrors: list[bool]) -> None:
        self.clock, self.window, self.mirrors = Clock(), window, mirrors
        self.key = f"machine:{next(self.keys)}"
        self.crawlers = [self.open(number) for number in range(3)]
        self.recorded: dict[bytes, float] = {}
        self.unique = 0

    def open(self, number: int) -> RedisBackend:
        return opened(
            "valkey",
            self.key,
            capacity=40,
            window_secs=self.window,
            mirror=self.mirrors[number],
            trust_secs=0.02,
            clock=self.clock,
        )

    def check(self, fingerprint: bytes, seen: bool) -> None:
        when = self.recorded.get(fingerprint)
        if when is None:
            assert not seen
            return
        age = self.clock.now - when
        if not self.window or age < self.window:
            assert seen
        elif age > 1.25 * self.window:
            assert not seen

    @rule(number=st.integers(0, 2), page=st.integers(0, 200))
    def add(self, number: int, page: int) -> None:
        fingerprint = b"%d" % page
        new = self.crawlers[number].add(fingerprint)
        self.check(fingerprint, not new)
        if new:
            self.recorded[fingerprint] = self.clock.now

    @rule(number=st.integers(0, 2), start=st.integers(0, 200))
    def add_many(self, number: int, start: int) -> None:
        for page in range(start, start + 30):
            self.add(number, page)

    @rule(number=st.integers(0, 2), page=st.integers(0, 200))
    def ask(self, number: int, page: int) -> None:
        fingerprint = b"%d" % page
        self.check(fingerprint, fingerprint in self.crawlers[number])

    @rule(seconds=st.sampled_from([1, 100, 260, 1300]))
    def wait(self, seconds: int) -> None:
        self.clock.now += seconds

    @rule(number=st.integers(0, 2))
    def reopen(self, number: int) -> None:
        self.crawlers[number].close()
        self.crawlers[number] = self.open(number)

    def all_notice(self) -> None:
        """Let each ask the server once: until then, mirrors may be trusted."""
        for number in range(3):
            self.unique += 1
            self.crawlers[number].add(b"unique %d" % self.unique)

    @rule(number=st.integers(0, 2))
    def clear(self, number: int) -> None:
        self.crawlers[number].clear()
        self.recorded.clear()
        self.all_notice()

    @rule(everything=st.booleans())
    def lose(self, everything: bool) -> None:
        client = servers.shared("valkey").client
        names = client.keys(f"*{self.key}*" if everything else f"{{{self.key}}}:blocks:*:0")
        if names:
            client.delete(*names)
        self.all_notice()
        self.recorded.clear()

    def teardown(self) -> None:
        for crawler in getattr(self, "crawlers", []):
            crawler.clear()
            crawler.close()


@pytest.mark.parametrize("examples", [20, pytest.param(200, marks=pytest.mark.soak)])
def test_any_sequence_of_uses(examples: int) -> None:
    run_state_machine_as_test(
        CrawlersAgainstDict, settings=settings(max_examples=examples, stateful_step_count=40)
    )
    left_behind = servers.keys_for_good(servers.shared("valkey").client, "*machine:*")
    assert left_behind == []
