"""A filter whose keys are lost or cleared: an empty one is begun, and nothing is left."""

import pytest

from scrapy_bloom.exceptions import RefusedError
from scrapy_bloom.redis.scripts import block_key
from tests.support import servers
from tests.support.redis_filters import PLACES, WARNING, fps, messages, opened


class TestLostKeys:
    @pytest.mark.parametrize("place", PLACES)
    @pytest.mark.parametrize("mirror", [True, False])
    def test_a_lost_key_loses_the_filter(
        self, place: str, mirror: bool, key: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        backend = opened(place, key, mirror=mirror)
        for fingerprint in fps(1000):
            backend.add(fingerprint)
        other = opened(place, key, mirror=mirror)
        (generation,) = backend.filter.live
        assert backend.server.send("DEL", block_key(backend.filter.key, generation.id, 0)) == 1
        assert backend.add(b"one more")
        (warning,) = messages(caplog, WARNING)
        assert "was lost" in warning
        assert "noeviction" in warning
        assert all(backend.add(fingerprint) for fingerprint in fps(500))
        assert not any(backend.add(fingerprint) for fingerprint in [*fps(500), b"one more"])
        assert len(messages(caplog, WARNING)) == 1
        assert not any(other.add(fingerprint) for fingerprint in [*fps(500), b"one more"])
        assert all(other.add(fingerprint) for fingerprint in fps(500, 1000))
        assert len(messages(caplog, WARNING)) == 2
        assert backend.filter.id == other.filter.id
        other.close()
        backend.close()

    @pytest.mark.parametrize(
        ("policy", "maxmemory", "may_evict"),
        [
            ("allkeys-lru", "500mb", True),
            ("allkeys-random", "0", False),
            ("volatile-lru", "500mb", False),  # the keys of a filter do not expire
            ("noeviction", "500mb", False),
        ],
    )
    def test_an_evicting_policy_is_warned_of(
        self,
        policy: str,
        maxmemory: str,
        may_evict: bool,
        server: servers.Server,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        server.client.config_set("maxmemory", maxmemory)
        server.client.config_set("maxmemory-policy", policy)
        opened("valkey", "k", url=server.url).close()
        warnings = messages(caplog, WARNING)
        assert [policy in each for each in warnings] == [True] * may_evict

    def test_an_evicting_policy_of_a_cluster_is_warned_of(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        cluster = servers.Cluster()
        for node in cluster.nodes:
            node.client.config_set("maxmemory", "1gb")
            node.client.config_set("maxmemory-policy", "allkeys-lfu")
        opened("cluster", "k", url=cluster.url).close()
        (warning,) = messages(caplog, WARNING)
        assert "allkeys-lfu" in warning
        cluster.end()

    def test_evicted_keys(self, server: servers.Server, caplog: pytest.LogCaptureFixture) -> None:
        """Other data pushes our keys out: what is new stays new, until that happens too often."""
        client = server.client
        backend = opened("valkey", "k", url=server.url, capacity=500_000)  # 4 keys
        client.config_set("maxmemory-policy", "allkeys-random")
        client.config_set("maxmemory", client.info("memory")["used_memory"] + 2**20)
        with pytest.raises(RefusedError, match="maxmemory-policy is allkeys-random, which evicts"):
            for round_number in range(1000):
                for number in range(4):
                    client.set(f"other:{round_number}:{number}", bytes(2**19))
                for fingerprint in fps(100 * round_number, 100 * round_number + 100):
                    assert backend.add(fingerprint)
        assert len(messages(caplog, WARNING)) == backend.losses - 1 == 9
        assert "evicted" in messages(caplog, WARNING)[0]
        backend.close()


# Cleared by another crawl.


def test_a_slow_worker_does_not_restore_a_flushed_filter(
    key: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It asks when the other one has gone, and has left nothing."""
    first = opened("valkey", key, trust_secs=0)
    second = opened("valkey", key)
    assert all(first.add(fingerprint) for fingerprint in fps(100))
    second.clear()
    second.close()
    assert not servers.shared("valkey").client.keys(f"*{key}*")
    assert first.add(fps(100)[7])
    assert first.status().count == 1
    (warning,) = messages(caplog, WARNING)
    assert "was lost: removed, flushed" in warning
    first.close()


def test_a_batch_that_meets_a_reset_is_recorded_in_the_new_filter(key: str) -> None:
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


def test_growing_while_another_clears_leaves_no_keys(key: str) -> None:
    first, second = (opened("valkey", key, capacity=100, trust_secs=0) for _ in range(2))
    for fingerprint in fps(99):
        first.add(fingerprint)
    append = first.filter.append

    def clear_first(*args: object) -> bool:
        second.clear()
        return append(*args)

    first.filter.append = clear_first
    for fingerprint in fps(99, 103):
        assert first.add(fingerprint)
    first.filter.append = append
    first.clear()
    first.close()
    second.close()
    assert not servers.shared("valkey").client.keys(f"*{key}*")
