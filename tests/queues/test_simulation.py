"""Random and exhaustive schedules of workers that share a crawl, with faults at each step."""

import time
from types import SimpleNamespace

import pytest

from scrapy_bloom.redis import filter as filter_module
from tests.support import exploration, simulated, simulation

USUAL, ALL = range(120), range(120, 10_000)
PARTS = 4
QUICK = ["", "leaves", "clock back", "killed"]  # kinds of faults that take seconds


@pytest.fixture(autouse=True)
def _in_simulated_time(monkeypatch: pytest.MonkeyPatch) -> None:
    simulated.patch(monkeypatch)


@pytest.mark.parametrize("part", range(PARTS))
def test_random_schedules(part: int) -> None:
    for seed in USUAL[part::PARTS]:
        simulation.simulate(seed)


@pytest.mark.parametrize("part", range(PARTS))
def test_random_schedules_of_four_shards(part: int) -> None:
    """With one fault at a time. A schedule takes four times as long: half as many."""
    for seed in USUAL[part :: 2 * PARTS]:
        simulation.simulate(seed, shards=4)


@pytest.mark.soak
@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("part", range(PARTS))
def test_many_random_schedules(part: int, shards: int) -> None:
    for seed in ALL[part::PARTS]:
        simulation.simulate(seed, shards=shards)


def explore(kind: str, monkeypatch: pytest.MonkeyPatch) -> exploration.Explored:
    explorer = exploration.Explorer(simulated.a_server(), [kind] if kind else [])
    times = SimpleNamespace(monotonic=time.monotonic, sleep=explorer.sleep)
    monkeypatch.setattr(filter_module, "time", times)
    return exploration.explore(explorer)


@pytest.mark.parametrize("kind", QUICK)
def test_all_schedules(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two workers and four pages, with one fault of a kind."""
    assert len(explore(kind, monkeypatch)) > 200


@pytest.mark.soak
@pytest.mark.parametrize("kind", [each for each in exploration.KINDS if each not in QUICK])
def test_all_schedules_of_other_faults(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(explore(kind, monkeypatch)) > 200
