"""A filter whose keys are lost or cleared: an empty one is begun, and nothing is left."""

import pytest

from scrapy_bloom.exceptions import RefusedError
from tests.support import servers
from tests.support.redis_filters import WARNING, fps, messages, opened


def test_evicted_keys(server: servers.Server, caplog: pytest.LogCaptureFixture) -> None:
    """Other data pushes our keys out: what is new stays new, until that happens too often."""
    client = server.client
    backend = opened("valkey", "k", url=server.url, capacity=500_000)  # 30 keys
    client.config_set("maxmemory-policy", "allkeys-random")
    client.config_set("maxmemory", client.info("memory")["used_memory"] + 2**22)
    with pytest.raises(RefusedError, match="lost 10 times in a row"):
        for round_number in range(1000):
            for number in range(16):
                client.set(f"other:{round_number}:{number}", bytes(2**19))
            for fingerprint in fps(100 * round_number, 100 * round_number + 100):
                assert backend.add(fingerprint)
    assert len(messages(caplog, WARNING)) == 9
    assert "evicted" in messages(caplog, WARNING)[0]
    backend.close()


# Cleared by another crawl.


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
    update = first.update

    def clear_first(*args: object) -> bool:
        second.clear()
        return update(*args)

    first.update = clear_first
    for fingerprint in fps(99, 103):
        assert first.add(fingerprint)
    first.update = update
    first.clear()
    first.close()
    second.close()
    assert not servers.shared("valkey").client.keys(f"*{key}*")
