"""Whole crawls of the example site, disturbed at random instants, as the benchmarks count them."""

import pytest

from tests.support import worker_faults
from tests.support.worker_faults import EXAMPLE, OURS, Kind

QUIET_SECS = 90.0


@pytest.mark.soak
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
