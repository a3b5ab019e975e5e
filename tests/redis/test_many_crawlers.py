"""Many crawlers on one filter: each fingerprint is new to exactly one of them."""

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from scrapy_bloom import StorageError
from tests.support import servers
from tests.support.processes import FORKING
from tests.support.redis_filters import (
    INFO,
    LIMIT,
    PLACES,
    fps,
    in_batches,
    messages,
    one_by_one,
    opened,
    record_at_once,
    url_of,
)


def at_once(
    number: int, record: Callable[..., object], count: int, *where: Any, **options: Any
) -> list[Any]:
    """Have processes record `count` fingerprints at the same moment; return what each returns."""
    barrier, results = FORKING.Barrier(number), FORKING.Queue()
    processes = [
        FORKING.Process(
            target=record_at_once, args=(barrier, results, record, count, where, options)
        )
        for _ in range(number)
    ]
    for process in processes:
        process.start()
    try:
        return [results.get(timeout=LIMIT) for _ in processes]
    finally:
        for process in processes:
            process.join(LIMIT)


class TestManyCrawlers:
    @pytest.mark.parametrize("place", PLACES)
    @pytest.mark.parametrize("mirror", [True, False])
    def test_each_fingerprint_is_new_to_exactly_one(
        self, place: str, mirror: bool, key: str
    ) -> None:
        count, options = 800, {"capacity": 100, "mirror": mirror}
        added = at_once(4, one_by_one, count, url_of(place), key, **options)
        times = Counter(number for numbers in added for number in numbers)
        assert len(times) == count  # new to nobody: 0
        assert set(times.values()) == {1}  # new to two: 0
        backend = opened(place, key)
        assert backend.status().count == count
        assert len(backend.status().generations) == 4
        assert not any(backend.add(fingerprint) for fingerprint in fps(count))
        backend.close()

    @pytest.mark.parametrize("place", PLACES)
    def test_batches_of_many_at_once(self, place: str, key: str) -> None:
        count, capacity = 800, 100
        added = at_once(4, in_batches, count, url_of(place), key, capacity=capacity)
        assert sum(added) == count
        backend = opened(place, key, capacity=capacity, mirror=False)
        assert all(fingerprint in backend for fingerprint in fps(count))
        assert backend.status().count == count
        assert backend.add_many(fps(count)) == 0
        backend.close()

    def test_workers_with_other_settings_join_what_is_there(
        self, key: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(INFO)
        first = opened("valkey", key)
        assert not [m for m in messages(caplog, INFO) if "other settings" in m]
        second = opened("valkey", key, capacity=10_000, error_rate=1e-15)
        (line,) = [m for m in messages(caplog, INFO) if "other settings" in m]
        assert "room for 2,000 requests" in line
        assert "error rate of 5e-13" in line
        assert first.add(b"page")
        assert not second.add(b"page")
        assert second.status().capacity == 2000
        first.close()
        second.close()

    def test_a_newer_format(self, key: str) -> None:
        opened("valkey", key).close()
        client = servers.shared("valkey").client
        raw = json.loads(client.hget(key, "filter"))
        client.hset(key, "filter", json.dumps({**raw, "format": 2}))
        with pytest.raises(StorageError, match="Upgrade scrapy_bloom"):
            opened("valkey", key)

    def test_recorded_requests_are_duplicates_for_others_at_once(self, key: str) -> None:
        first, second = (opened("valkey", key, trust_secs=3600) for _ in range(2))
        assert first.add_many(fps(1000)) == 1000
        trips = second.status().more["redis/round_trips"]
        assert not any(second.add(fingerprint) for fingerprint in fps(1000))
        used = second.status().more["redis/round_trips"] - trips
        assert used == 1000
        assert not any(second.add(fingerprint) for fingerprint in fps(1000))
        assert second.status().more["redis/round_trips"] - trips < used + 100  # the mirror knows
        assert second.status().more["redis/mirror_hits"] == 1000
        first.close()
        second.close()

    def test_after_growing_a_new_request_still_takes_one_round_trip(self, key: str) -> None:
        backend = opened("valkey", key, capacity=1000)
        assert backend.add_many(fps(8000)) == 8000
        trips = backend.status().more["redis/round_trips"]
        room = backend.status().generations[-1].capacity
        number = min(500, room // 4)
        for fingerprint in fps(10_000, 10_000 + number):
            assert backend.add(fingerprint)
        used = backend.status().more["redis/round_trips"] - trips
        assert number <= used <= number + 2
        backend.close()
