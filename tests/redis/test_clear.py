"""A filter that is cleared or flushed: nobody brings back what was in it, and nothing is left."""

import json
import time

import pytest

import servers
from redis_filters import WARNING, fps, make, messages, opened


class TestClear:
    def test_a_crawler_that_meets_only_what_it_knows_notices(self, key: str) -> None:
        first, second = opened("valkey", key), opened("valkey", key)
        for fingerprint in fps(100):
            assert first.add(fingerprint)
        second.clear()
        assert all(first.add(fingerprint) for fingerprint in fps(100))
        assert not any(second.add(fingerprint) for fingerprint in fps(100))
        first.close()
        second.close()

    def test_what_one_has_flushed_the_end_of_another_does_not_bring_back(
        self, key: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        first, second = opened("valkey", key), opened("valkey", key, flush=True)
        for fingerprint in fps(100):
            assert first.add(fingerprint)
        second.close()
        first.close()
        assert not servers.keys_for_good(servers.shared("valkey").client, f"{key}*")
        assert messages(caplog, WARNING) == []

    def test_what_one_has_flushed_a_slow_one_does_not_bring_back(
        self, key: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        """It asks when the other one has gone, and has left nothing but a note."""
        first = opened("valkey", key, trust_secs=0)
        second = opened("valkey", key, flush=True)
        assert all(first.add(fingerprint) for fingerprint in fps(100))
        second.close()
        assert servers.shared("valkey").client.hkeys(key) == [b"reset"]
        assert first.add(fps(100)[7])
        assert first.status().count == 1
        assert first.status().more["redis/lost_keys"] == 0
        assert messages(caplog, WARNING) == []
        first.close()
        assert servers.shared("valkey").client.ttl(key) == -1

    def test_a_batch_that_meets_a_reset_is_recorded_in_the_new_filter(
        self, key: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        first, second = (opened("valkey", key, capacity=200) for _ in range(2))
        assert first.add_many(fps(900)) == 900  # in three generations
        assert second.add(b"other")
        second._store.reset()
        assert second.add(b"one more")
        assert first.add_many(fps(1000, 1040)) == 40
        assert first.status().more["redis/lost_keys"] == 0
        assert messages(caplog, WARNING) == []
        first.close()
        second.close()
        again = opened("valkey", key)
        assert again.status().count == 41
        again.close()

    def test_a_crawler_killed_while_it_clears_leaves_a_list_of_what_is_left(self, key: str) -> None:
        backend = opened("valkey", key)
        assert backend.add(b"page")
        backend._store.redefine(backend._shared._new_info())  # and dies
        client = servers.shared("valkey").client
        assert client.ttl(key) == -1
        again = opened("valkey", key)
        assert again.add(b"page")
        assert len(client.keys(f"{key}:*")) == 1
        again.close()

    def test_what_takes_the_place_of_a_filter_set_aside_is_of_now(self, key: str) -> None:
        first = opened("valkey", key)
        assert first.add(b"page")
        first.close()
        second = make("valkey", key, trust_secs=0)
        second._set_aside(second._store.read())
        info = second._store.read().info
        assert info is not None
        assert abs(info.created_at - time.time()) < 60
        second.open()
        assert second.add(b"page")
        second.close()

    def test_growing_while_another_clears_leaves_no_keys(self, key: str) -> None:
        first, second = (opened("valkey", key, capacity=100, trust_secs=0) for _ in range(2))
        for fingerprint in fps(99):
            first.add(fingerprint)
        seal = first._store.blocks.seal

        def clear_first(generation: object) -> None:
            second.clear()
            seal(generation)

        first._store.blocks.seal = clear_first
        for fingerprint in fps(99, 103):
            assert first.add(fingerprint)
        first._store.blocks.seal = seal
        first.clear()
        first.close()
        second.close()
        assert not servers.keys_for_good(servers.shared("valkey").client, f"{key}*")

    def test_what_the_old_filter_has_is_new_to_the_next_one(self, key: str) -> None:
        """The old one is sealed when it is asked, and cleared when that is looked into."""
        first, second = opened("valkey", key), opened("valkey", key)
        assert second.add(b"page")
        second._store.blocks.seal(second._shared.view.newest)
        second._store.redefine(second._shared._new_info())  # and dies
        assert not first.add(b"page")
        assert first.add(b"page")
        assert not first.add(b"page")
        first.close()

    def test_all_forget(self, key: str) -> None:
        first, second = opened("valkey", key), opened("valkey", key)
        assert first.add(b"page")
        assert not second.add(b"page")
        second.clear()
        assert second.add(b"page")
        assert first.add(b"other")
        assert not first.add(b"page")
        first.close()
        second.close()
        assert opened("valkey", key).status().count == 2

    def test_nothing_stays_after_a_flush_at_the_close(self, key: str) -> None:
        client = servers.shared("valkey").client
        backend = opened("valkey", key, flush=True)
        backend.add(b"page")
        assert client.keys(f"{key}*")
        backend.close()
        assert not servers.keys_for_good(client, f"{key}*")

    def test_clearing_and_closing_leaves_nothing(self, key: str) -> None:
        backend = opened("valkey", key)
        backend.add(b"page")
        backend.clear()
        assert backend.status().count == 0
        backend.close()
        assert not servers.keys_for_good(servers.shared("valkey").client, f"{key}*")

    def test_a_filter_that_was_cleared_names_no_queue(self, key: str) -> None:
        """Else the queue of the next one, which is another, would be taken for lost."""
        backend, client = opened("valkey", key), servers.shared("valkey").client
        for remove in (backend.clear, backend._store.reset):
            client.hset(key, "queue", "0123456789abcdef")
            remove()
            assert not client.hexists(key, "queue")
        backend.close()

    def test_a_crawler_that_died_while_it_made_keys_leaves_none_for_long(self, key: str) -> None:
        backend = opened("valkey", key)
        client = servers.shared("valkey").client
        client.hset(key, "draft:00000abc", json.dumps([2, time.time() - 4000]))
        client.hset(key, "draft:00000def", json.dumps([1, time.time() - 10]))
        for name in ("00000abc:0", "00000abc:1", "00000def:0"):
            client.set(f"{key}:{name}", "blocks")
        opened("valkey", key).close()
        assert not client.exists(f"{key}:00000abc:0", f"{key}:00000abc:1")
        assert client.exists(f"{key}:00000def:0")  # perhaps it is still at it
        assert client.hkeys(key).count(b"draft:00000def") == 1
        backend.close()
