"""Random schedules of workers that share a crawl, with faults at random steps."""

import random

import pytest

from tests.support import simulated
from tests.support.simulated_site import Site

# These have found faults, of the package or of the checks.
FAULTS = [391, 443, 973, 20381, 22761, 23274, 23387, 23942]
FAULTS += [40449, 44691, 49853, 49987, 65846, 73134]
USUAL, ALL = [*range(120), *FAULTS], range(120, 10_000)
PARTS = 4


@pytest.fixture(autouse=True)
def _in_simulated_time(monkeypatch: pytest.MonkeyPatch) -> None:
    simulated.patch(monkeypatch)


@pytest.mark.parametrize("part", range(PARTS))
def test_random_schedules(part: int) -> None:
    for seed in USUAL[part::PARTS]:
        simulated.simulate(seed)


def test_workers_leave_while_start_runs() -> None:
    """Another worker runs start() again, also if the reactor has cancelled it."""
    pages = range(8)
    site = Site([[]] * 8, pages, True, False, [], {}, {}, set(), {})
    for seed in range(10, 20):
        dice = random.Random(seed)
        simulated.ids.seed(seed)
        world = simulated.World(simulated.a_server(), site, dice, ["leaves"])
        try:
            world.crawl_all(faults=2, rate=0.05, most=20_000)
            world.check()
        finally:
            world.end()


@pytest.mark.soak
@pytest.mark.parametrize("part", range(PARTS))
def test_many_random_schedules(part: int) -> None:
    for seed in ALL[part::PARTS]:
        simulated.simulate(seed)
