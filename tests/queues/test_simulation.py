"""Random schedules of workers that share a crawl, with faults at random steps."""

import pytest

from tests.support import simulated

USUAL, ALL = range(120), range(120, 10_000)
PARTS = 4


@pytest.fixture(autouse=True)
def _in_simulated_time(monkeypatch: pytest.MonkeyPatch) -> None:
    simulated.patch(monkeypatch)


@pytest.mark.parametrize("part", range(PARTS))
def test_random_schedules(part: int) -> None:
    for seed in USUAL[part::PARTS]:
        simulated.simulate(seed)


@pytest.mark.soak
@pytest.mark.parametrize("part", range(PARTS))
def test_many_random_schedules(part: int) -> None:
    for seed in ALL[part::PARTS]:
        simulated.simulate(seed)
