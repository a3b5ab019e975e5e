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

from scrapy_bloom.filters.sizing import choose_geometry
from scrapy_bloom.generations.memory import Backend
from scrapy_bloom.redis.connection.server import RedisServer
from tests.support import servers
from tests.support.backends import local_backend, redis_backend

NewBackend = Callable[..., Backend]


def local(directory: Path, **changes: object) -> Backend:
    options = {"capacity": 2000, "error_rate": 1e-9, "sync_secs": 0}
    return local_backend(directory / "bloom", **{**options, **changes})


def memory(directory: Path, **changes: object) -> Backend:
    options = {"capacity": 2000, "error_rate": 1e-9}
    return local_backend(None, **{**options, **changes})


def redis(url: str, directory: Path, *, cluster: bool = False, **changes: object) -> Backend:
    options = {"capacity": 2000, "error_rate": 1e-9}
    key = os.fspath(directory)
    return redis_backend(RedisServer(url, cluster=cluster), key, **{**options, **changes})


def on(program: str, **fixed: object) -> NewBackend:
    return lambda directory, **changes: redis(
        servers.shared(program).url, directory, **{**fixed, **changes}
    )


def on_cluster(directory: Path, **changes: object) -> Backend:
    return redis(servers.shared_cluster().url, directory, cluster=True, **changes)


SHARED = {
    **{program: on(program) for program in servers.PROGRAMS},
    "cluster": on_cluster,
    "no mirror": on("valkey", mirror=False),
}
PERSISTENT = {"local": local, **SHARED}
BACKENDS = {"memory": memory, **PERSISTENT}


def makers(kinds: dict[str, NewBackend]) -> Callable[..., NewBackend]:
    """A fixture over kinds of backends: what makes those that keep their filter in one place."""

    @pytest.fixture(params=kinds)
    def maker(request: pytest.FixtureRequest, tmp_path: Path) -> NewBackend:
        return lambda **changes: kinds[request.param](tmp_path, **changes)

    return maker


new = makers(BACKENDS)
persistent = makers(PERSISTENT)


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
    assert status.load == 0.25
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
    backend = new(capacity=50, error_rate=0.5, on_full="warn")
    backend.open()
    for number in range(4000):
        backend.add(b"%d" % number)
    assert all(b"%d" % number in backend for number in range(4000))
    assert backend.status().error_rate_now > 0.05
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


def test_what_is_forgotten_is_new_once_more(new: NewBackend) -> None:
    backend = new(capacity=50)  # it grows
    backend.open()
    backend.begin()
    names = [b"%d" % number for number in range(700)]
    assert all(backend.add(name) for name in names)
    backend.forgotten.add(names[::2])
    backend.forgotten.add(names[:2])
    assert [name in backend for name in names] == [False, False, *[False, True] * 349]
    assert [backend.add(name) for name in names] == [True, True, *[True, False] * 349]
    assert not any(backend.add(name) for name in names)
    assert all(name in backend for name in names)
    assert backend.status().count == 700
    backend.forgotten.add([b"never added"])
    assert backend.add(b"never added")
    assert not backend.add(b"never added")
    backend.close()


def test_a_page_that_is_crawled_again_stays_recorded_for_a_whole_window(
    persistent: NewBackend,
) -> None:
    now = 1e9
    backend = persistent(window_secs=100.0, clock=lambda: now)
    backend.open()
    backend.begin()
    for quarter in range(4):
        now = 1e9 + 26 * quarter
        assert backend.add(b"page %d" % quarter)
    assert len(backend.status().generations) == 4
    backend.forgotten.add([b"page 1"])
    assert backend.add(b"page 1")
    assert not backend.add(b"page 2")
    backend.close()
    now += 60  # the first quarters are over, and what was added again is not
    backend = persistent(window_secs=100.0, clock=lambda: now)
    backend.open()
    backend.begin()
    assert backend.add(b"page 0")
    assert not backend.add(b"page 1")
    backend.close()


class BackendAgainstSet(RuleBasedStateMachine):
    """Any sequence of adding, asking, closing and reopening, compared with a Python set."""

    name: str

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.model: set[bytes] = set()
        self.recorded: set[bytes] = set()  # with what is forgotten
        self.forgotten: set[bytes] = set()
        self.open()

    def open(self) -> None:
        self.backend = BACKENDS[self.name](
            Path(self.directory.name), capacity=20_000, salt=bytes(range(16))
        )
        self.backend.open()

    @rule(fingerprint=st.binary(max_size=24))
    def add(self, fingerprint: bytes) -> None:
        assert self.backend.add(fingerprint) == (fingerprint not in self.model)
        if fingerprint in self.forgotten:
            self.forgotten.discard(fingerprint)
        self.model.add(fingerprint)
        self.recorded.add(fingerprint)

    @rule(seed=st.integers(0, 10**9))
    def add_many(self, seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(100):
            self.add(rng.randbytes(8))

    @rule(fingerprint=st.binary(max_size=24))
    def ask(self, fingerprint: bytes) -> None:
        assert (fingerprint in self.backend) == (fingerprint in self.model)

    def some_recorded(self, data: st.DataObject) -> list[bytes]:
        return data.draw(st.lists(st.sampled_from(sorted(self.recorded)), max_size=20))

    @precondition(lambda self: self.recorded)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        some = self.some_recorded(data)
        self.backend.forgotten.add(some)
        self.model.difference_update(some)
        self.forgotten.update(some)

    @precondition(lambda self: self.recorded)
    @rule(data=st.data())
    def add_once_more(self, data: st.DataObject) -> None:
        self.add(data.draw(st.sampled_from(sorted(self.recorded))))

    @precondition(lambda self: self.name != "memory")
    @rule()
    def reopen(self) -> None:
        self.backend.close()
        self.open()

    @invariant()
    def counts(self) -> None:
        assert self.backend.status().count == len(self.recorded)

    def teardown(self) -> None:
        assert all(fingerprint in self.backend for fingerprint in self.model)
        self.backend.close()
        self.directory.cleanup()


@pytest.mark.parametrize("name", BACKENDS)
def test_any_sequence_of_uses(name: str) -> None:
    machine = type("Machine", (BackendAgainstSet,), {"name": name})
    is_shared = name in SHARED  # each request there is a round trip
    run_state_machine_as_test(
        machine,
        settings=settings(max_examples=6 if is_shared else 30, stateful_step_count=30),
    )
