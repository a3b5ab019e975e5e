"""Whole crawls of the example site, disturbed at random instants, as the benchmarks count them."""

import signal
from pathlib import Path

import pytest

from tests.support import job_kills, worker_faults
from tests.support.example_crawls import TINY, ExampleSite, undisturbed
from tests.support.worker_faults import EXAMPLE, OURS, Kind

QUIET_SECS = 90.0

pytestmark = pytest.mark.soak


@pytest.mark.parametrize("signals", [[signal.SIGKILL], [signal.SIGTERM] * 2, [signal.SIGHUP]])
def test_every_page_is_crawled_by_a_job_that_is_killed(
    signals: list[signal.Signals], tmp_path: Path
) -> None:
    with ExampleSite(TINY) as site:
        usual = undisturbed(site, tmp_path / "usual", job_kills.OURS)
    for number in range(5):
        case = job_kills.Case(str(signals[0]), number, signals, kills=2)
        outcome = job_kills.disturbed(tmp_path, TINY, usual, number, case)
        assert outcome.is_complete, outcome
        assert outcome.has_ended, outcome


@pytest.mark.parametrize("kind", worker_faults.KINDS, ids=lambda kind: kind.name.replace(" ", "-"))
def test_every_page_is_crawled_by_workers_that_share_a_queue(kind: Kind) -> None:
    cases = [
        worker_faults.Case(kind, OURS, EXAMPLE, grows, again=True, number=number)
        for number, grows in enumerate([True, False])
    ]
    for outcome in worker_faults.outcomes(cases, QUIET_SECS, quick=True):
        assert outcome.is_complete, outcome.description
        assert outcome.has_ended, outcome.description
        assert not outcome.tracebacks, outcome.description
