"""Random schedules of workers that share a crawl, with faults at random steps."""

import random

import pytest

from tests.support import simulated
from tests.support.simulated_site import Site

USUAL, ALL, PARTS = 40, 10_000, 4


@pytest.fixture(autouse=True)
def _in_simulated_time(monkeypatch: pytest.MonkeyPatch) -> None:
    simulated.patch(monkeypatch)


@pytest.mark.parametrize("most", [USUAL, pytest.param(ALL, marks=pytest.mark.soak)])
@pytest.mark.parametrize("part", range(PARTS))
def test_random_schedules(part: int, most: int) -> None:
    for seed in range(part, most, PARTS):
        simulated.simulate(seed)


def test_workers_leave_while_start_runs() -> None:
    """Another worker runs start() again, also if the reactor has cancelled it."""
    pages = range(8)
    site = Site([[]] * 8, pages, True, False, [], {}, {}, set(), {})
    for seed in range(10, 15):
        dice = random.Random(seed)
        simulated.ids.seed(seed)
        world = simulated.World(simulated.a_server(), site, dice, ["leaves"])
        try:
            world.crawl_all(faults=2, rate=0.05, most=20_000)
            world.check()
        finally:
            world.end()
