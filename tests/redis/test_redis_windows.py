"""Time windows of a filter alone in Redis, with a clock of our own: each opening begins a run."""

import pytest

from tests.support.clock import Clock
from tests.support.redis_filters import make


@pytest.mark.parametrize("mirror", [True, False])
def test_where_nobody_begins_runs_the_time_does(key: str, mirror: bool) -> None:
    clock = Clock()
    options = {"window_secs": 1000, "is_endless": True, "mirror": mirror, "trust_secs": 0}
    workers = [make("valkey", key, clock=clock, **options) for _ in range(2)]
    for worker in workers:
        worker.open()
    recorded_at, ages = clock.now, []
    for number in range(150):
        worker = workers[number % 7 % 2]
        if worker.add(b"page"):
            ages.append(clock.now - recorded_at)
            recorded_at = clock.now
        assert len(worker.status().generations) <= 9
        clock.now += 20 + number % 3
    for worker in workers:
        worker.close()
    assert len(ages) > 3
    # Less a twelfth of the window, or up to a twelfth more.
    assert all(1000 * 11 / 12 <= age <= 1000 * 13 / 12 for age in ages[1:])
