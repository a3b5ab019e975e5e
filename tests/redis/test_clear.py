"""A filter that is cleared or flushed: no worker restores it, and nothing is left."""

import pytest

from tests.support import servers
from tests.support.redis_filters import WARNING, fps, messages, opened


def left(key: str) -> list[bytes]:
    """The keys that are there."""
    return servers.shared("valkey").client.keys(f"*{key}*")


class TestClear:
    def test_a_slow_worker_does_not_restore_a_flushed_filter(
        self, key: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        """It asks when the other one has gone, and has left nothing."""
        first = opened("valkey", key, trust_secs=0)
        second = opened("valkey", key, flush=True)
        assert all(first.add(fingerprint) for fingerprint in fps(100))
        second.close()
        assert not left(key)
        assert first.add(fps(100)[7])
        assert first.status().count == 1
        (warning,) = messages(caplog, WARNING)
        assert "was lost: removed, flushed" in warning
        first.close()

    def test_a_batch_that_meets_a_reset_is_recorded_in_the_new_filter(self, key: str) -> None:
        first, second = (opened("valkey", key, capacity=200) for _ in range(2))
        assert first.add_many(fps(900)) == 900  # in three generations
        assert second.add(b"other")
        second.clear()
        assert second.add(b"one more")
        assert first.add_many(fps(1000, 1040)) == 40
        first.close()
        second.close()
        again = opened("valkey", key)
        assert again.status().count == 41
        again.close()

    def test_a_worker_that_knows_one_generation_removes_all(self, key: str) -> None:
        first, second = (opened("valkey", key, capacity=100) for _ in range(2))
        assert first.add_many(fps(1000)) == 1000
        assert len(second.shards[0].live) == 1
        second.clear()
        assert not left(key)
        first.close()
        second.close()

    def test_growing_while_another_clears_leaves_no_keys(self, key: str) -> None:
        first, second = (opened("valkey", key, capacity=100, trust_secs=0) for _ in range(2))
        for fingerprint in fps(99):
            first.add(fingerprint)
        append = first.shards[0].append

        def clear_first(*args: object) -> bool:
            second.clear()
            return append(*args)

        first.shards[0].append = clear_first
        for fingerprint in fps(99, 103):
            assert first.add(fingerprint)
        first.shards[0].append = append
        first.clear()
        first.close()
        second.close()
        assert not left(key)
