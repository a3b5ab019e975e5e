"""What every backend promises: one suite, run over all of them."""

import itertools
import os
import tempfile
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
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

from scrapy_bloom.crawl.startup import Backend
from scrapy_bloom.filters.sizing import choose_geometry
from scrapy_bloom.job.jobdir import FILE
from scrapy_bloom.job.reader import FilterReader
from scrapy_bloom.redis.server import RedisServer
from tests.support import servers
from tests.support.backends import local_backend, redis_backend
from tests.support.clock import Clock
from tests.support.redis_filters import url_of

NewBackend = Callable[..., Backend]


SHARED = [*servers.PROGRAMS, "cluster", "no mirror"] if servers.PROGRAMS else []
BACKENDS = ["memory", "local", *SHARED]


def make(name: str, directory: Path, **changes: Any) -> Backend:
    options = {"capacity": 2000, "error_rate": 1e-9, **changes}
    if name not in SHARED:
        return local_backend(directory if name == "local" else None, **options)
    if name == "no mirror":
        name, options["mirror"] = "valkey", False
    return redis_backend(RedisServer(url_of(name)), os.fspath(directory), **options)


WINDOW = 1000.0  # seconds
NUMBERS = st.integers(0, 2)  # of crawlers
MOST_LOSSES = 9  # a crawl gives up after ten in a row
PAGES = st.integers(0, 300).map(b"%d".__mod__) | st.binary(max_size=24)


@pytest.fixture(params=BACKENDS)
def new(request: pytest.FixtureRequest, tmp_path: Path) -> NewBackend:
    """Each kind of backend, in one place."""
    return lambda **changes: make(request.param, tmp_path, **changes)


def test_the_status_counts_what_is_recorded(new: NewBackend) -> None:
    backend = new()
    backend.open()
    backend.begin()
    for number in [*range(500), *range(300)]:
        backend.add(b"%d" % number)
    status = backend.status()
    assert status.count == 500
    assert (status.capacity, status.error_rate) == (2000, 1e-9)
    (generation,) = status.generations
    assert generation.geometry == choose_geometry(2000, 5e-10)  # half for growth
    assert status.nbytes == generation.geometry.nbytes
    assert 0 < status.fill_ratio < 0.5
    assert 0 < status.error_rate_now < 1e-9
    assert 0 < status.expected_false_positives < 1e-6
    assert status.location
    assert status.errors == 0
    backend.close()


def test_fingerprints_of_any_length(new: NewBackend) -> None:
    backend = new()
    backend.open()
    for fingerprint in (b"", b"\xff" * 65_535):
        assert backend.add(fingerprint)
        assert not backend.add(fingerprint)
    backend.close()


def test_other_types_than_bytes_are_refused_and_change_nothing(new: NewBackend) -> None:
    backend = new()
    backend.open()
    with pytest.raises(TypeError, match="bytes"):
        backend.add("page")
    assert backend.status().count == 0
    assert backend.add(b"page")
    backend.close()


def test_it_works_past_its_capacity(new: NewBackend) -> None:
    backend = new(capacity=50, error_rate=0.5)
    backend.open()
    for number in range(1000):
        backend.add(b"%d" % number)
    assert all(b"%d" % number in backend for number in range(1000))
    assert len(backend.status().generations) > 1
    assert 0.01 < backend.status().error_rate_now <= 0.5
    backend.close()


class BackendAgainstDict(RuleBasedStateMachine):
    """Any sequence of uses by a crawler, or by three that share a filter, compared with a dict."""

    name: str

    @initialize(window=st.sampled_from([0.0, WINDOW]), mirrors=st.lists(st.booleans(), min_size=3))
    def begin(self, window: float, mirrors: list[bool]) -> None:
        self.directory = tempfile.TemporaryDirectory()
        self.clock, self.window, self.mirrors = Clock(), window, mirrors
        self.latest, self.unique = self.clock.now, itertools.count()
        self.begun = 0.0  # when the last run began
        self.losses = 0
        self.recorded_in: dict[bytes, float] = {}  # when the last run had begun by then
        self.crawlers = [self.open(number) for number in range(3 if self.name in SHARED else 1)]

    def open(self, number: int) -> Any:
        options: dict[str, Any] = {"capacity": 40, "window_secs": self.window, "clock": self.clock}
        if self.name in SHARED:
            # A crawler may find a page in its mirror that has expired in the run of another one.
            trust_secs = 0.0 if self.window else 0.02
            options |= {"mirror": self.mirrors[number], "trust_secs": trust_secs}
        options["salt"] = bytes(range(16))
        crawler: Any = make(self.name, Path(self.directory.name), **options)
        crawler.open()
        crawler.begin()
        self.begun = max(self.begun, self.clock.now)
        return crawler

    def crawler(self, number: int) -> Any:
        return self.crawlers[number % len(self.crawlers)]

    def check(self, page: bytes, is_new: bool) -> None:
        when = self.recorded_in.get(page)
        if when is None:
            assert is_new
        elif not self.window or self.begun - when < 23 / 24 * self.window:
            assert not is_new
        elif self.begun - when > (23 / 24 + 1 / 8) * self.window:
            assert is_new

    @rule(number=NUMBERS, page=PAGES)
    def add(self, number: int, page: bytes) -> None:
        is_new = self.crawler(number).add(page)
        self.check(page, is_new)
        if is_new:
            self.recorded_in[page] = self.begun

    @rule(number=NUMBERS, start=st.integers(0, 200))
    def add_some(self, number: int, start: int) -> None:
        for page in range(start, start + 30):
            self.add(number, b"%d" % page)

    @rule(number=NUMBERS, page=PAGES)
    def ask(self, number: int, page: bytes) -> None:
        for entry in [page, *[*self.recorded_in][:10]]:
            self.check(entry, entry not in self.crawler(number))

    @rule(secs=st.sampled_from([1.0, 100.0, 260.0, 600.0, 1300.0]))
    def wait(self, secs: float) -> None:
        self.clock.now = self.latest = self.latest + secs

    @rule(number=NUMBERS, secs=st.floats(1, 3000))
    def the_clock_jumps_back_and_recovers(self, number: int, secs: float) -> None:
        self.clock.now = self.latest - secs
        if self.name != "memory":
            self.reopen(number)
        self.ask(number, b"page")
        self.clock.now = self.latest

    @precondition(lambda self: self.name != "memory")
    @rule(number=NUMBERS)
    def reopen(self, number: int) -> None:
        number %= len(self.crawlers)
        live = self.crawlers[number].status().generations
        self.crawlers[number].close()
        if self.name == "local":
            with closing(FilterReader(Path(self.directory.name, FILE))) as reader:
                assert [*map(asdict, live)] == [*map(asdict, reader.generations)]
        self.crawlers[number] = self.open(number)
        if self.name in SHARED:
            live = self.crawlers[number].status().generations
            assert len(self.keys("}:blocks:*:made")) == len(live)

    @precondition(lambda self: self.name in SHARED and self.losses < MOST_LOSSES)
    @rule(number=NUMBERS, everything=st.booleans())
    def clear_or_lose(self, number: int, everything: bool) -> None:
        """Let a crawler clear the filter, or the server lose all of it or the first blocks."""
        if number == 0:
            self.crawlers[0].clear()
        elif names := self.keys("*" if everything else "}:blocks:*:0"):
            servers.shared(self.name).client.delete(*names)
        self.losses += 1
        self.recorded_in.clear()
        self.begun = self.latest
        for (
            crawler
        ) in self.crawlers:  # each asks the server once: until then, it may trust its mirror
            page = b"unique %d" % next(self.unique)
            assert crawler.add(page)
            self.recorded_in[page] = self.begun

    def keys(self, ending: str) -> list[bytes]:
        return list(servers.shared(self.name).client.scan_iter(f"*{self.directory.name}{ending}"))

    @invariant()
    def the_error_rate_is_bounded(self) -> None:
        for entry in getattr(self, "crawlers", []):
            rates = [generation.error_rate for generation in entry.status().generations]
            assert sum(rates) <= 1e-9 * (1 + 1e-9)

    def teardown(self) -> None:
        if self.name != "memory":
            self.reopen(0)
        if not self.window:
            assert self.crawlers[0].status().count == len(self.recorded_in)
        for page in self.recorded_in:
            self.check(page, page not in self.crawlers[0])
        for crawler in self.crawlers:
            if self.name in SHARED:
                crawler.clear()
            crawler.close()
        assert self.name not in SHARED or not self.keys("*")
        self.directory.cleanup()


@pytest.mark.parametrize("times", [1, pytest.param(20, marks=pytest.mark.soak)])
@pytest.mark.parametrize("name", ["memory", "local", *SHARED[:1]])
def test_any_sequence_of_uses(name: str, times: int) -> None:
    machine = type("Machine", (BackendAgainstDict,), {"name": name})
    examples = times * (10 if name in SHARED else 15)  # each request there is a round trip
    run_state_machine_as_test(
        machine, settings=settings(max_examples=examples, stateful_step_count=25)
    )
