"""What every backend promises: one suite, run over all of them."""

import os
import random
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import servers
from scrapy_bloom.backend import Backend
from scrapy_bloom.local import LocalBackend
from scrapy_bloom.redis_backend import RedisBackend
from scrapy_bloom.redis_server import RedisServer
from scrapy_bloom.sizing import choose_geometry

NewBackend = Callable[..., Backend]


def local(directory: Path, **changes: object) -> Backend:
    options = {"capacity": 2000, "error_rate": 1e-9, "sync_secs": 0}
    return LocalBackend(directory / "bloom", **{**options, **changes})


def memory(directory: Path, **changes: object) -> Backend:
    options = {"capacity": 2000, "error_rate": 1e-9}
    return LocalBackend(None, **{**options, **changes})


def redis(url: str, directory: Path, *, cluster: bool = False, **changes: object) -> Backend:
    options = {"capacity": 2000, "error_rate": 1e-9}
    key = os.fspath(directory)
    return RedisBackend(RedisServer(url, cluster=cluster), key, **{**options, **changes})


def on(program: str, **fixed: object) -> NewBackend:
    return lambda directory, **changes: redis(
        servers.shared(program).url, directory, **{**fixed, **changes}
    )


def on_cluster(directory: Path, **changes: object) -> Backend:
    return redis(servers.shared_cluster().url, directory, cluster=True, **changes)


def counting(new: NewBackend) -> NewBackend:
    return lambda directory, **changes: new(directory, **{"counting": True, **changes})


SHARED = {
    **{program: on(program) for program in servers.PROGRAMS},
    "cluster": on_cluster,
    "no mirror": on("valkey", mirror=False),
}
COUNTING = {
    f"counting {name}": counting(backend)
    for name, backend in {"local": local, **SHARED}.items()
    if name not in {"no mirror", "redis"}  # there is no mirror; and one kind of server will do
}
SHARED |= {name: backend for name, backend in COUNTING.items() if name != "counting local"}
PERSISTENT = {"local": local, **COUNTING, **SHARED}
COUNTING["counting memory"] = counting(memory)
BACKENDS = {"memory": memory, **PERSISTENT, **COUNTING}
PLAIN = {name: backend for name, backend in BACKENDS.items() if name not in COUNTING}


def makers(kinds: dict[str, NewBackend]) -> Callable[..., NewBackend]:
    """A fixture over kinds of backends: what makes those that keep their filter in one place."""

    @pytest.fixture(params=kinds)
    def maker(request: pytest.FixtureRequest, tmp_path: Path) -> NewBackend:
        return lambda **changes: kinds[request.param](tmp_path, **changes)

    return maker


new = makers(BACKENDS)
persistent = makers(PERSISTENT)
counting_backend = makers(COUNTING)
plain = makers(PLAIN)


def test_add_tells_what_is_new(new: NewBackend) -> None:
    backend = new()
    backend.open()
    backend.begin()
    assert b"page" not in backend
    assert backend.add(b"page") is True
    assert backend.add(b"page") is False
    assert b"page" in backend
    assert b"other" not in backend
    backend.close()


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
    counting = status.saturated is not None
    assert generation.geometry == choose_geometry(2000, 5e-10, counting=counting)  # half for growth
    assert status.nbytes == generation.geometry.nbytes
    assert status.load == 0.25
    assert 0 < status.fill_ratio < 0.5
    assert 0 < status.error_rate_now < 1e-9
    assert 0 < status.expected_false_drops < 1e-6
    assert status.location
    assert status.errors == 0
    backend.close()


@pytest.mark.parametrize("fingerprint", [b"", b"\0", bytes(20), b"\xff" * 65_535])
def test_fingerprints_of_any_length(new: NewBackend, fingerprint: bytes) -> None:
    backend = new()
    backend.open()
    assert backend.add(fingerprint)
    assert not backend.add(fingerprint)
    backend.close()


def test_what_is_no_bytes_is_refused_and_changes_nothing(new: NewBackend) -> None:
    backend = new()
    backend.open()
    with pytest.raises(TypeError, match="must be bytes"):
        backend.add("page")
    assert backend.status().count == 0
    assert backend.add(b"page")
    backend.close()


def test_it_works_past_its_capacity(new: NewBackend) -> None:
    backend = new(capacity=50, error_rate=0.5, on_full="warn")
    backend.open()
    for number in range(6000):
        backend.add(b"%d" % number)
    assert all(b"%d" % number in backend for number in range(6000))
    assert backend.status().error_rate_now > 0.05
    backend.close()


def test_everything_is_there_after_reopening(persistent: NewBackend) -> None:
    recorded: list[bytes] = []
    for run in range(5):
        backend = persistent()
        backend.open()
        assert backend.status().count == len(recorded)
        assert all(fingerprint in backend for fingerprint in recorded)
        backend.begin()
        for number in range(100):
            fingerprint = b"%d/%d" % (run, number)
            assert backend.add(fingerprint)
            recorded.append(fingerprint)
        backend.close()


def test_opening_and_closing_without_a_crawl_changes_nothing(persistent: NewBackend) -> None:
    for _ in range(3):
        backend = persistent()
        backend.open()
        backend.close()
    backend = persistent()
    backend.open()
    assert backend.status().count == 0
    backend.close()


def test_it_keeps_its_size_when_the_settings_change(persistent: NewBackend) -> None:
    backend = persistent()
    backend.open()
    backend.add(b"page")
    backend.close()
    backend = persistent(capacity=1_000_000, error_rate=0.01)
    backend.open()
    assert backend.status().capacity == 2000
    assert not backend.add(b"page")
    backend.close()


def test_the_salt_is_kept(persistent: NewBackend) -> None:
    for salt in (bytes(range(16)), None, bytes(16)):
        backend = persistent(salt=salt)
        backend.open()
        backend.add(b"page")
        assert backend.status().count == 1
        backend.close()


def test_what_is_discarded_is_new_again(counting_backend: NewBackend) -> None:
    backend = counting_backend()
    backend.open()
    backend.begin()
    names = [b"%d" % number for number in range(500)]
    for name in names:
        assert backend.add(name)
        assert not backend.add(name)  # to be forgotten all the same
    for name in names[:200]:
        assert backend.discard(name) is True
        assert name not in backend
        assert backend.discard(name) is False
    assert backend.discard(b"never added") is False
    assert backend.status().count == 300
    assert all(name in backend for name in names[200:])
    assert all(backend.add(name) for name in names[:200])
    assert backend.status().count == 500
    assert backend.status().saturated == 0
    backend.close()


def test_without_counters_nothing_is_forgotten(plain: NewBackend) -> None:
    backend = plain()
    backend.open()
    backend.add(b"page")
    assert backend.discard(b"page") is False
    assert backend.discard(b"other") is False
    assert b"page" in backend
    assert backend.status().count == 1
    assert backend.status().saturated is None
    backend.close()


def test_forgetting_in_older_generations(counting_backend: NewBackend) -> None:
    backend = counting_backend(capacity=50)
    backend.open()
    names = [b"%d" % number for number in range(700)]
    assert all(backend.add(name) for name in names)
    assert len(backend.status().generations) == 4
    assert all(backend.discard(name) for name in names[::2])
    assert backend.status().count == 350
    assert [name in backend for name in names] == [False, True] * 350
    assert all(backend.add(name) for name in names[::2])
    assert not any(backend.add(name) for name in names)
    backend.close()


def test_forgetting_within_a_window(counting_backend: NewBackend) -> None:
    now = 1e9
    backend = counting_backend(window_secs=100.0, clock=lambda: now)
    backend.open()
    backend.begin()
    for quarter in range(4):
        now = 1e9 + 26 * quarter
        assert backend.add(b"page %d" % quarter)
    assert len(backend.status().generations) == 4
    assert backend.discard(b"page 1")
    assert backend.add(b"page 1")
    assert not backend.add(b"page 2")
    now += 60  # the first quarter is over, and what was added again is not
    assert backend.add(b"page 0")
    assert not backend.add(b"page 1")
    backend.close()


def test_what_was_forgotten_stays_so(persistent: NewBackend) -> None:
    for run in range(3):
        backend = persistent(counting=True)
        backend.open()
        backend.begin()
        assert backend.add(b"page"), run
        assert backend.add(b"other %d" % run)
        assert backend.discard(b"page")
        assert backend.status().count == run + 1
        backend.close()


def test_counting_from_the_second_run_on(
    persistent: NewBackend, caplog: pytest.LogCaptureFixture
) -> None:
    backend = persistent(counting=False)
    backend.open()
    assert all(backend.add(b"old %d" % number) for number in range(100))
    backend.close()
    for run in range(2):
        caplog.clear()
        backend = persistent(counting=True)
        with caplog.at_level("INFO", "scrapy_bloom"):
            backend.open()
            backend.begin()
        lines = [each for each in caplog.messages if "BLOOM_COUNTING" in each]
        assert len(lines) == 1 - run
        assert all("generation 2" in line and "100 recorded before" in line for line in lines)
        assert backend.add(b"new %d" % run)
        assert backend.add(b"forgotten")
        assert backend.discard(b"forgotten")
        assert not backend.discard(b"old 1")
        assert b"old 1" in backend
        status = backend.status()
        assert [each.geometry.is_counting for each in status.generations] == [False, True]
        assert [each.count for each in status.generations] == [100, run + 1]
        assert sum(each.error_rate for each in status.generations) <= 1e-9
        backend.close()


def test_counting_is_given_up(persistent: NewBackend, caplog: pytest.LogCaptureFixture) -> None:
    backend = persistent(counting=True, capacity=50)
    backend.open()
    assert backend.add(b"page")
    backend.close()
    backend = persistent(counting=False, capacity=50)
    with caplog.at_level("INFO", "scrapy_bloom"):
        backend.open()
    assert any("counters" in line for line in caplog.messages)
    assert not backend.add(b"page")
    assert all(backend.add(b"%d" % number) for number in range(100))
    status = backend.status()
    assert [each.geometry.is_counting for each in status.generations] == [True, False]
    backend.close()


class BackendAgainstSet(RuleBasedStateMachine):
    """Any sequence of adding, asking, closing and reopening, beside a Python set."""

    name: str

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.model: set[bytes] = set()
        self.open()

    def open(self) -> None:
        self.backend = BACKENDS[self.name](
            Path(self.directory.name), capacity=20_000, salt=bytes(range(16))
        )
        self.backend.open()

    @rule(fingerprint=st.binary(max_size=24))
    def add(self, fingerprint: bytes) -> None:
        assert self.backend.add(fingerprint) == (fingerprint not in self.model)
        self.model.add(fingerprint)

    @rule(seed=st.integers(0, 10**9))
    def add_many(self, seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(300):
            self.add(rng.randbytes(8))

    @rule(fingerprint=st.binary(max_size=24))
    def ask(self, fingerprint: bytes) -> None:
        assert (fingerprint in self.backend) == (fingerprint in self.model)

    @rule(fingerprint=st.binary(max_size=24))
    def discard(self, fingerprint: bytes) -> None:
        expected = self.name in COUNTING and fingerprint in self.model
        assert self.backend.discard(fingerprint) == expected
        if expected:
            self.model.discard(fingerprint)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def discard_some(self, data: st.DataObject) -> None:
        for fingerprint in data.draw(st.lists(st.sampled_from(sorted(self.model)), max_size=20)):
            self.discard(fingerprint)

    @precondition(lambda self: self.name in PERSISTENT)
    @rule()
    def reopen(self) -> None:
        self.backend.close()
        self.open()

    @invariant()
    def counts(self) -> None:
        assert self.backend.status().count == len(self.model)

    def teardown(self) -> None:
        assert all(fingerprint in self.backend for fingerprint in self.model)
        self.backend.close()
        self.directory.cleanup()


@pytest.mark.parametrize("name", BACKENDS)
def test_any_sequence_of_uses(name: str) -> None:
    machine = type("Machine", (BackendAgainstSet,), {"name": name})
    examples = 10 if name in SHARED else 30  # each request there is a round trip
    run_state_machine_as_test(
        machine, settings=settings(max_examples=examples, stateful_step_count=30)
    )
