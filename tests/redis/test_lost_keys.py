"""Keys that a server has lost: written back from the mirrors, or made anew, with one warning."""

import pytest

import servers
from redis_filters import PLACES, WARNING, fps, messages, opened
from scrapy_bloom.redis.keys.store import RedisStore


class TestLostKeys:
    @pytest.mark.parametrize("place", PLACES)
    def test_a_lost_key_is_written_back_from_the_mirror(
        self, place: str, key: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        backend = opened(place, key)
        for fingerprint in fps(1000):
            backend.add(fingerprint)
        client = backend._store.server._client
        (generation,) = RedisStore(backend.server, key).read().generations
        assert client.delete(f"{key}:{generation.id}:0") == 1
        assert backend.add(b"one more")
        (warning,) = messages(caplog, WARNING)
        assert "were lost" in warning
        assert "noeviction" in warning
        other = opened(place, key)
        assert not any(other.add(fingerprint) for fingerprint in [*fps(1000), b"one more"])
        assert backend.status().more["redis/lost_keys"] == 1
        assert len(messages(caplog, WARNING)) == 1
        other.close()
        backend.close()

    def test_without_a_mirror_it_is_made_anew(
        self, key: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        backend = opened("valkey", key, mirror=False)
        for fingerprint in fps(1000):
            backend.add(fingerprint)
        client = servers.shared("valkey").client
        (generation,) = RedisStore(backend.server, key).read().generations
        client.delete(f"{key}:{generation.id}:0")
        assert all(backend.add(fingerprint) for fingerprint in fps(1000))
        assert not any(backend.add(fingerprint) for fingerprint in fps(1000))
        (warning,) = messages(caplog, WARNING)
        assert "made anew, empty" in warning
        backend.close()

    @pytest.mark.parametrize("mirror", [True, False])
    def test_flushall(
        self, server: servers.Server, mirror: bool, caplog: pytest.LogCaptureFixture
    ) -> None:
        first, second = (
            opened("valkey", "k", url=server.url, capacity=1000, mirror=mirror) for _ in range(2)
        )
        for number, fingerprint in enumerate(fps(3000)):
            assert (first, second)[number % 2].add(fingerprint)
        server.client.flushall()
        assert first.add(b"one")
        assert second.add(b"two")
        assert not first.add(b"two")
        if mirror:
            third = opened("valkey", "k", url=server.url)
            known = sum(not third.add(fingerprint) for fingerprint in fps(3000))
            # Each knew its own half of the newest generation, and all of those before.
            assert known > 1500
            assert third.status().count >= 3000
            third.close()
        assert 1 <= len(messages(caplog, WARNING)) <= 2
        assert all("were lost" in warning for warning in messages(caplog, WARNING))
        first.close()
        second.close()

    def test_after_a_flush_one_crawler_goes_on_as_if_nothing_was(
        self, server: servers.Server
    ) -> None:
        backend = opened("valkey", "k", url=server.url, capacity=1000)
        for fingerprint in fps(5000):
            assert backend.add(fingerprint)
        server.client.flushall()
        assert backend.add(b"new")
        backend.close()
        again = opened("valkey", "k", url=server.url)
        assert again.status().count == 5001
        assert not any(again.add(fingerprint) for fingerprint in [*fps(5000), b"new"])
        again.close()

    def test_only_the_hash_is_lost(self, server: servers.Server) -> None:
        backend = opened("valkey", "k", url=server.url, capacity=1000)
        for fingerprint in fps(3000):
            assert backend.add(fingerprint)
        server.client.delete("k")
        for fingerprint in fps(3000, 5000):
            assert backend.add(fingerprint)
        backend.close()
        again = opened("valkey", "k", url=server.url)
        assert not any(again.add(fingerprint) for fingerprint in fps(5000))
        assert again.status().count == 5000
        again.close()

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
        """Other data pushes our keys out, again and again: nothing fails, nothing is lost."""
        client = server.client
        backend = opened("valkey", "k", url=server.url, capacity=500_000)  # 4 keys
        client.config_set("maxmemory-policy", "allkeys-random")
        client.config_set("maxmemory", client.info("memory")["used_memory"] + 2**20)
        recorded = []
        for round_number in range(20):
            for number in range(4):
                client.set(f"other:{round_number}:{number}", bytes(2**19))
            for fingerprint in fps(100 * round_number, 100 * round_number + 100):
                assert backend.add(fingerprint)
                recorded.append(fingerprint)
            assert not any(backend.add(fingerprint) for fingerprint in recorded)
        assert backend.status().more["redis/lost_keys"] > 0
        (warning,) = messages(caplog, WARNING)
        assert "evicted" in warning
        backend.close()
