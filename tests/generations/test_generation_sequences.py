"""Any sequence of uses of a filter, compared with a dict."""

import random
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from tests.support.clock import Clock
from tests.support.local_filters import WINDOW, files, make


class AgainstDict(RuleBasedStateMachine):
    """Add, ask, grow, expire, close and reopen, compared with a dict of recording times."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.clock = Clock()
        self.latest = self.clock.now
        self.recorded_at: dict[bytes, float] = {}
        self.open()

    def open(self) -> None:
        self.backend = make(Path(self.directory.name), self.clock, capacity=40, window_secs=WINDOW)
        self.backend.begin()

    @rule(number=st.integers(0, 300))
    def add(self, number: int) -> None:
        fingerprint = number.to_bytes(20, "big")
        self.check(fingerprint, is_new := self.backend.add(fingerprint))
        if is_new:
            self.recorded_at[fingerprint] = self.latest

    @rule(seed=st.integers(0, 10**6))
    def add_many(self, seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(100):
            self.add(rng.randrange(301))

    @rule(number=st.integers(0, 300))
    def ask(self, number: int) -> None:
        fingerprint = number.to_bytes(20, "big")
        self.check(fingerprint, fingerprint not in self.backend)

    def check(self, fingerprint: bytes, is_new: bool) -> None:
        if fingerprint not in self.recorded_at:
            assert is_new
        else:
            recorded = self.recorded_at[fingerprint]
            age = self.latest - recorded
            if age < WINDOW:
                assert not is_new
            elif age > 1.25 * WINDOW:
                assert is_new

    @rule(secs=st.floats(0.001, 3000))
    def wait(self, secs: float) -> None:
        self.clock.now = self.latest = self.latest + secs

    @rule(secs=st.floats(1, 3000))
    def the_clock_jumps_back_and_recovers(self, secs: float) -> None:
        self.clock.now = self.latest - secs
        for fingerprint, recorded in self.recorded_at.items():
            if self.latest - recorded < WINDOW:
                assert not self.backend.add(fingerprint)
        self.clock.now = self.latest

    @rule()
    def reopen(self) -> None:
        self.backend.close()
        assert files(Path(self.directory.name)) == [
            f"generation-{each.number:04d}.bloom" for each in self.backend.live
        ]
        self.open()

    @invariant()
    def is_bounded(self) -> None:
        status = self.backend.status()
        assert sum(each.error_rate for each in status.generations) <= 1e-9

    def teardown(self) -> None:
        self.backend.close()
        self.directory.cleanup()


def test_any_sequence_of_uses() -> None:
    run_state_machine_as_test(
        AgainstDict, settings=settings(max_examples=30, stateful_step_count=30)
    )
