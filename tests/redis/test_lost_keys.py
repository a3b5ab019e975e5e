"""Keys that a server has lost: an empty filter is begun, with one warning."""

import pytest

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
        (generation,) = backend.shards[0].live
        assert backend.server.send("DEL", block_key(backend.shards[0].key, generation.id, 0)) == 1
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
        assert backend.shards[0].id == other.shards[0].id
        other.close()
        backend.close()

    def test_flushall_without_mirrors(
        self, server: servers.Server, caplog: pytest.LogCaptureFixture
    ) -> None:
        first, second = (
            opened("valkey", "k", url=server.url, capacity=1000, mirror=False) for _ in range(2)
        )
        for number, fingerprint in enumerate(fps(3000)):
            assert (first, second)[number % 2].add(fingerprint)
        server.client.flushall()
        assert first.add(b"one")
        assert second.add(b"two")
        assert not first.add(b"two")
        assert len(messages(caplog, WARNING)) == 2  # one of each
        assert all("was lost" in warning for warning in messages(caplog, WARNING))
        first.close()
        second.close()

    def test_an_evicting_policy_is_warned_of(
        self, server: servers.Server, caplog: pytest.LogCaptureFixture
    ) -> None:
        server.client.config_set("maxmemory", "500mb")
        server.client.config_set("maxmemory-policy", "allkeys-lru")
        opened("valkey", "k", url=server.url).close()
        (warning,) = messages(caplog, WARNING)
        assert "allkeys-lru" in warning
        caplog.clear()
        server.client.config_set("maxmemory-policy", "noeviction")
        opened("valkey", "k", url=server.url).close()
        assert messages(caplog, WARNING) == []

    def test_evicted_keys(self, server: servers.Server, caplog: pytest.LogCaptureFixture) -> None:
        """Other data pushes our keys out, again and again: nothing fails, what is new stays new."""
        client = server.client
        backend = opened("valkey", "k", url=server.url, capacity=500_000)  # 4 keys
        client.config_set("maxmemory-policy", "allkeys-random")
        client.config_set("maxmemory", client.info("memory")["used_memory"] + 2**20)
        for round_number in range(20):
            for number in range(4):
                client.set(f"other:{round_number}:{number}", bytes(2**19))
            for fingerprint in fps(100 * round_number, 100 * round_number + 100):
                assert backend.add(fingerprint)
        assert backend.losses
        assert len(messages(caplog, WARNING)) == backend.losses
        assert "evicted" in messages(caplog, WARNING)[0]
        backend.close()
