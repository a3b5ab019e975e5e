"""The shared filter: many crawlers at once, lost keys, outages, windows, settings."""

import hashlib
import itertools
import json
import logging
import multiprocessing
import os
import random
import secrets
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
    run_state_machine_as_test,
)

import servers
from proxies import DroppingProxy
from scrapy_bloom import (
    FingerprinterMismatchError,
    OutageError,
    StorageError,
)
from scrapy_bloom.filters.sizing import choose_geometry
from scrapy_bloom.redis.backend import RedisBackend
from scrapy_bloom.redis.connection.server import RedisServer
from scrapy_bloom.redis.keys.meta import CHUNK_BLOCKS
from scrapy_bloom.redis.keys.store import RedisStore

PLACES = [*servers.PROGRAMS, "cluster"]
WARNING, INFO, ERROR = logging.WARNING, logging.INFO, logging.ERROR


def fps(start: int, stop: int | None = None) -> list[bytes]:
    numbers = range(start) if stop is None else range(start, stop)
    return [hashlib.sha1(b"%d" % number).digest() for number in numbers]


def url_of(place: str) -> str:
    return servers.shared_cluster().url if place == "cluster" else servers.shared(place).url


def make(place: str, key: str, *, url: str = "", **options: object) -> RedisBackend:
    """A backend, not yet opened; at this error rate it does not err in a test.

    A server that is only slow is not away, however short the deadline is.
    """
    server = RedisServer(
        f"{url or url_of(place)}?socket_timeout=10",
        cluster=place == "cluster",
        deadline_secs=options.pop("deadline_secs", 10),
    )
    return RedisBackend(server, key, **{"capacity": 2000, "error_rate": 1e-12, **options})


def opened(place: str, key: str, **options: object) -> RedisBackend:
    in_a_run = options.pop("in_a_run", True)  # else what has expired is not kept for the run
    backend = make(place, key, **options)
    backend.open()
    if in_a_run:
        backend.begin()
    return backend


@pytest.fixture
def key(tmp_path: Path) -> str:
    return os.fspath(tmp_path)


def messages(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno == level and record.name.startswith("scrapy_bloom")
    ]


def at_once(number: int, work: Callable[..., object], *args: object) -> list[object]:
    """Run a function in processes of their own, all beginning at the same moment."""
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(number), context.Queue()
    processes = [
        context.Process(target=work, args=(barrier, results, *args)) for _ in range(number)
    ]
    for process in processes:
        process.start()
    try:
        return [results.get(timeout=120) for _ in processes]
    finally:
        for process in processes:
            process.join(30)


def add_all(barrier, results, place, url, key, count, options) -> None:
    backend = make(place, key, url=url, **options)
    backend.open()
    backend.begin()
    barrier.wait(60)
    results.put([n for n, fingerprint in enumerate(fps(count)) if backend.add(fingerprint)])
    backend.close()


def add_some_in_batches(barrier, results, place, url, key, count, options) -> None:
    """Each adds all of them, in an order of its own, some alone and some in batches."""
    backend = make(place, key, url=url, **options)
    backend.open()
    backend.begin()
    rest = fps(count)
    random.Random().shuffle(rest)
    barrier.wait(60)
    new = 0
    while rest:
        batch, rest = rest[:300], rest[300:]
        new += sum(map(backend.add, batch[:100]))
        new += backend.add_many(batch[100:])
    results.put(new)
    backend.close()


class TestManyCrawlers:
    @pytest.mark.parametrize("place", PLACES)
    @pytest.mark.parametrize(
        "options",
        [{"capacity": 50_000}, {"capacity": 1000}, {"capacity": 1000, "mirror": False}],
        ids=["one generation", "growing", "growing, no mirror"],
    )
    def test_each_fingerprint_is_new_to_exactly_one(
        self, place: str, options: dict[str, object], key: str
    ) -> None:
        count = 20_000 if options["capacity"] == 50_000 else 8000
        told = at_once(4, add_all, place, url_of(place), key, count, options)
        times = Counter(number for numbers in told for number in numbers)
        assert len(times) == count  # new to nobody: 0
        assert set(times.values()) == {1}  # new to two: 0
        backend = opened(place, key)
        assert backend.status().count == count
        assert len(backend.status().generations) == (1 if count == 20_000 else 4)
        assert not any(backend.add(fingerprint) for fingerprint in fps(count))
        backend.close()

    @pytest.mark.parametrize("place", PLACES)
    @pytest.mark.parametrize("capacity", [100_000, 500], ids=["one generation", "growing"])
    def test_batches_of_many_at_once(self, place: str, capacity: int, key: str) -> None:
        count = 6000
        options = {"capacity": capacity}
        told = at_once(4, add_some_in_batches, place, url_of(place), key, count, options)
        assert sum(told) == count
        backend = opened(place, key, capacity=capacity, mirror=False)
        assert all(fingerprint in backend for fingerprint in fps(count))
        assert backend.status().count == count
        assert backend.add_many(fps(count)) == 0
        backend.close()

    def test_a_batch_after_all_was_lost(self, key: str) -> None:
        backend = opened("valkey", key)
        assert backend.add_many(fps(1000)) == 1000
        client = servers.shared("valkey").client
        client.unlink(*client.keys(f"{key}*"))
        backend.add_many(fps(500, 1500))
        other = opened("valkey", key)
        assert all(fingerprint in other for fingerprint in fps(500, 1500))
        for each in (backend, other):
            each.close()

    @pytest.mark.parametrize("place", PLACES)
    def test_created_by_many_at_once_it_is_one_filter(self, place: str, key: str) -> None:
        at_once(6, add_all, place, url_of(place), key, 1, {"capacity": 3_000_000})
        client = (
            servers.shared_cluster().client if place == "cluster" else servers.shared(place).client
        )
        stored = RedisStore(RedisServer(url_of(place), cluster=place == "cluster"), key).read()
        (generation,) = stored.generations
        assert not stored.left_over
        assert not stored.drafts
        names = {name.decode() for name in client.scan_iter(match=f"{key}*", count=1000)}
        assert names == {
            key,
            *(f"{key}:{generation.id}:{chunk}" for chunk in range(generation.num_chunks)),
        }

    def test_a_cluster_spreads_the_blocks_over_all_masters(self, key: str) -> None:
        backend = opened("cluster", key, capacity=3_000_000, error_rate=1e-9)
        backend.close()
        nodes = servers.shared_cluster().nodes
        chunks = [len(node.client.keys(f"{key}:*")) for node in nodes]
        total = -(-choose_geometry(3_000_000, 5e-10).num_blocks // CHUNK_BLOCKS)
        assert sum(chunks) == total
        assert min(chunks) > 0

    def test_no_lost_reply_makes_a_page_lost(self) -> None:
        """A proxy drops 1 % of the replies, after the server has executed the command."""
        server = servers.Server()
        proxy = DroppingProxy(server.port, 0.01, seed=1)
        try:
            url = f"redis://127.0.0.1:{proxy.port}/0"
            backend = opened("valkey", "k", url=url, capacity=2000)
            answers = [(f, backend.add(f)) for n in range(2) for f in fps(10_000)]
            assert proxy.dropped > 100
            new = [fingerprint for fingerprint, is_new in answers if is_new]
            assert set(new) == set(fps(10_000))
            assert len(new) - 10_000 <= proxy.dropped
            status = backend.status()
            assert status.more["redis/retries"] >= proxy.dropped * 0.9
            assert 10_000 <= status.count <= 10_000 + 2000
            backend.close()
        finally:
            proxy.end()
            server.end()

    def test_workers_with_other_settings_join_what_is_there(
        self, key: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(INFO)
        first = opened("valkey", key, salt=bytes(16))
        assert not [m for m in messages(caplog, INFO) if "other settings" in m]
        second = opened("valkey", key, salt=bytes(range(16)), capacity=10_000, error_rate=1e-15)
        (line,) = [m for m in messages(caplog, INFO) if "other settings" in m]
        assert "room for 2,000 requests" in line
        assert "salt" in line
        assert "error rate of 5e-13" in line
        assert first.add(b"page")
        assert not second.add(b"page")
        assert second.status().capacity == 2000
        first.close()
        second.close()

    def test_another_fingerprinter_is_refused(self, key: str) -> None:
        opened("valkey", key, fingerprinter="one.Fingerprinter").close()
        with pytest.raises(FingerprinterMismatchError, match="REQUEST_FINGERPRINTER_CLASS"):
            opened("valkey", key, fingerprinter="another.Fingerprinter")

    def test_what_one_recorded_others_are_told_of_without_waiting(self, key: str) -> None:
        first, second = (opened("valkey", key, trust_secs=3600) for _ in range(2))
        for fingerprint in fps(1000):
            assert first.add(fingerprint)
        trips = second.status().more["redis/round_trips"]
        assert not any(second.add(fingerprint) for fingerprint in fps(1000))
        assert second.status().more["redis/round_trips"] == trips + 1000
        assert not any(second.add(fingerprint) for fingerprint in fps(1000))
        assert second.status().more["redis/round_trips"] == trips + 1000  # the mirror knows them
        assert second.status().more["redis/mirror_hits"] == 1000
        first.close()
        second.close()

    def test_after_growing_a_new_request_still_takes_one_round_trip(self, key: str) -> None:
        backend = opened("valkey", key, capacity=1000)
        for fingerprint in fps(8000):
            backend.add(fingerprint)
        trips = backend.status().more["redis/round_trips"]
        room = backend.status().generations[-1].capacity
        number = min(2000, room // 4)
        for fingerprint in fps(10_000, 10_000 + number):
            assert backend.add(fingerprint)
        used = backend.status().more["redis/round_trips"] - trips
        assert number <= used <= 1.1 * number  # the rest: telling the count
        backend.close()

    def test_one_that_is_slow_to_tell_does_not_let_it_overflow(self, key: str) -> None:
        """Twenty crawlers, of which one does nearly all."""
        crawlers = [opened("valkey", key, capacity=10_000) for _ in range(20)]
        drawn = random.Random(1)
        recorded = 0
        while len(crawlers[0].status().generations) == 1:
            number = 0 if drawn.random() < 0.9 else drawn.randrange(1, 20)
            crawlers[number].add(b"%d" % recorded)
            recorded += 1
        assert recorded <= 1.05 * 10_000
        for crawler in crawlers:
            crawler.close()

    def test_crawlers_with_pauses_grow_the_filter_once(self, key: str) -> None:
        """Each knows that it is full, and meets its next new request after another has grown it."""
        crawlers = [opened("valkey", key, capacity=2000) for _ in range(8)]
        for number, fingerprint in enumerate(fps(5000)):
            assert crawlers[number % 8].add(fingerprint)
        sizes = [each.capacity for each in crawlers[0].status().generations]
        assert sizes == [2000, 4000]
        for crawler in crawlers:
            crawler.close()

    def test_two_that_come_too_late_at_once(self, key: str) -> None:
        """One in the first generation, one in the second: exactly one of them is told "new"."""
        late, later, fast = (opened("valkey", key, capacity=40, mirror=False) for _ in range(3))
        for fingerprint in fps(41):
            fast.add(fingerprint)  # the second generation is made
        later.add(b"so that it knows of the second one")
        answers: list[bool] = []
        thread = threading.Thread(target=lambda: answers.append(late.add(b"page")))
        in_the_first, in_the_second = threading.Event(), threading.Event()
        blocks = later._store.blocks
        look, record, follow = blocks.look, blocks.record, late._shared.follow

        def look_at_the_first(*args: object) -> object:
            answer = look(*args)
            blocks.look = look
            for fingerprint in fps(41, 200):
                fast.add(fingerprint)  # the third one is made
            thread.start()  # it knows of the first one only
            assert in_the_first.wait(60)
            return answer

        def follow_later(*args: object) -> object:
            in_the_first.set()
            assert in_the_second.wait(60)
            return follow(*args)

        def record_in_the_second(*args: object) -> object:
            answer = record(*args)
            blocks.record = record
            in_the_second.set()
            thread.join(60)
            return answer

        blocks.look = look_at_the_first
        blocks.record = record_in_the_second
        late._shared.follow = follow_later
        answers.append(later.add(b"page"))
        assert sorted(answers) == [False, True]
        for crawler in (late, later, fast):
            crawler.close()

    def test_who_comes_second_does_not_make_another_filter(self, server: servers.Server) -> None:
        """There is room for one only."""
        second = make("valkey", "k", url=server.url, capacity=1_000_000, deadline_secs=20)
        take = second._store.lock.take

        def after_the_first() -> bool:
            if not server.client.hexists("k", "lock taken"):
                server.client.hset("k2", "lock taken", 1)
                second._store.lock.take = take
                opened("valkey", "k", url=server.url, capacity=1_000_000).close()
                used = server.client.info("memory")["used_memory"]
                server.client.config_set("maxmemory", used + 2_000_000)
            return take()

        second._store.lock.take = after_the_first
        second.open()
        assert second.status().capacity == 1_000_000
        second.close()


def test_a_short_wait_for_another_crawler_is_no_warning(
    key: str, caplog: pytest.LogCaptureFixture
) -> None:
    client = servers.shared("valkey").client
    begun = time.monotonic()
    client.set(f"{key}:lock", "web-1:4711:0123456789abcdef", px=3000)
    backend = opened("valkey", key)
    assert time.monotonic() - begun > 2
    assert not messages(caplog, WARNING)
    backend.close()


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


class TestLostKeys:
    @pytest.mark.parametrize("place", PLACES)
    def test_a_lost_key_is_written_back_from_the_mirror(
        self, place: str, key: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        backend = opened(place, key)
        for fingerprint in fps(1000):
            backend.add(fingerprint)
        client = backend._store.server._client
        (generation,) = RedisStore(backend._server, key).read().generations
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
        (generation,) = RedisStore(backend._server, key).read().generations
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


def fill_up(server: servers.Server) -> None:
    """From now on the server has room for requests, and not for a generation."""
    used = server.client.info("memory")["used_memory"]
    server.client.config_set("maxmemory", used + 150_000)


class TestFull:
    def test_no_room_to_grow(
        self, server: servers.Server, caplog: pytest.LogCaptureFixture
    ) -> None:
        backend = opened("valkey", "k", url=server.url, capacity=20_000)
        used = server.client.info("memory")["used_memory"]
        server.client.config_set("maxmemory", used + 200_000)  # the next one takes 300,000
        for fingerprint in fps(25_000):
            backend.add(fingerprint)
        status = backend.status()
        assert len(status.generations) == 1
        assert status.errors > 1  # it has tried again
        (error,) = messages(caplog, ERROR)
        assert error.startswith("No room for a new generation: the server's memory is full")
        server.client.config_set("maxmemory", 0)
        for fingerprint in fps(25_000, 30_000):
            backend.add(fingerprint)
        assert len(backend.status().generations) == 2
        assert not any(backend.add(fingerprint) for fingerprint in fps(30_000))
        backend.close()
        assert len(server.client.keys("k:*")) == 2  # what was begun in vain is gone

    def test_no_room_at_the_start(self, server: servers.Server) -> None:
        used = server.client.info("memory")["used_memory"]
        server.client.config_set("maxmemory", used + 500_000)
        with pytest.raises(StorageError, match="memory is full.*BLOOM_EXPECTED_REQUESTS"):
            opened("valkey", "k", url=server.url, capacity=1_000_000, deadline_secs=1)
        assert not server.client.keys("k:*")

    def test_no_room_to_turn(
        self, server: servers.Server, caplog: pytest.LogCaptureFixture
    ) -> None:
        """What is recorded is remembered for longer then, and no page is lost for it."""
        clock = Clock()
        options = {"url": server.url, "capacity": 200_000, "window_secs": 1000, "clock": clock}
        backend = opened("valkey", "k", in_a_run=False, **options)
        assert backend.add(b"first")
        fill_up(server)
        for number in range(3):
            clock.now += 300
            assert backend.add(b"%d" % number)
        assert len(backend.status().generations) == 1
        (error,) = messages(caplog, ERROR)
        assert error.startswith("No room for a new generation: the server's memory is full")
        assert error.endswith("Requests are remembered for longer than BLOOM_WINDOW_SECS")
        assert not backend.add(b"first")
        server.client.config_set("maxmemory", 0)
        clock.now += 300
        assert backend.add(b"later")
        assert len(backend.status().generations) == 2
        clock.now += 1000
        assert backend.add(b"first")
        backend.close()

    def test_no_room_when_the_window_is_switched_off(
        self, server: servers.Server, caplog: pytest.LogCaptureFixture
    ) -> None:
        """What is recorded from now on does not end with the quarter, all the same."""
        clock = Clock()
        options = {"url": server.url, "capacity": 20_000, "clock": clock}
        backend = opened("valkey", "k", **options, window_secs=1000)
        assert backend.add(b"page")
        backend.close()
        fill_up(server)
        backend = opened("valkey", "k", **options)
        (error,) = messages(caplog, ERROR)
        assert error.startswith("No room for a new generation: the server's memory is full")
        assert backend.add(b"other")
        clock.now += 5000
        assert not backend.add(b"other")
        backend.close()
        assert [
            each.open_until for each in RedisStore(backend._server, "k").read().generations
        ] == [0]

    def test_warn_stays_in_one_generation(self, key: str) -> None:
        backend = opened("valkey", key, capacity=100, on_full="warn", error_rate=1e-6)
        for fingerprint in fps(1000):
            backend.add(fingerprint)
        assert len(backend.status().generations) == 1
        assert backend.status().load > 5
        backend.close()


def test_a_late_count_leaves_nothing_behind(key: str) -> None:
    """A crawler counts for a generation that has expired meanwhile."""
    clock = Clock()
    options = {"window_secs": 1000, "clock": clock, "in_a_run": False}
    first, second = (opened("valkey", key, **options) for _ in range(2))
    assert first.add(b"page")
    clock.now += 3000
    assert second.add(b"page")
    first.close()
    assert not [name for name in servers.shared("valkey").client.hkeys(key) if b":1" in name]
    second.close()


class Clock:
    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


class TestWindows:
    @pytest.mark.parametrize("mirror", [True, False])
    def test_requests_expire_for_all_crawlers(self, key: str, mirror: bool) -> None:
        clock = Clock()
        options = {"window_secs": 1000, "clock": clock, "mirror": mirror, "capacity": 400}
        options["in_a_run"] = False
        crawlers = [opened("valkey", key, **options) for _ in range(2)]
        recorded: dict[bytes, float] = {}
        for step in range(120):
            clock.now += 30
            one, other = crawlers[step % 2], crawlers[(step + 1) % 2]
            fingerprint = fps(step, step + 1)[0]
            assert one.add(fingerprint)
            recorded[fingerprint] = clock.now
            for known, when in recorded.items():
                if clock.now - when < 1000:
                    assert known in other
                elif clock.now - when > 1250:
                    assert known not in other
        assert max(len(each.status().generations) for each in crawlers) <= 6
        generations = len(crawlers[0].status().generations)
        for each in crawlers:
            each.close()
        client = servers.shared("valkey").client
        assert len(client.keys(f"{key}:*")) == generations  # what has expired is removed

    def test_a_window_is_switched_on_and_off(self, key: str) -> None:
        clock = Clock()
        for number, window in enumerate([0, 1000, 0, 1000]):
            backend = opened("valkey", key, window_secs=window, clock=clock)
            assert backend.add(b"%d" % number)
            clock.now += 100
            assert all(b"%d" % earlier in backend for earlier in range(number + 1))
            backend.close()
        backend = opened("valkey", key, window_secs=1000, clock=clock)
        backend.add(b"more")  # after what was open without a window, another one begins
        backend.close()
        backend = opened("valkey", key, window_secs=1000, clock=clock, in_a_run=False)
        clock.now += 2000
        assert backend.add(b"more")
        backend.close()

    def test_growth_within_a_quarter(self, key: str) -> None:
        clock = Clock()
        options = {"window_secs": 1000, "clock": clock, "in_a_run": False}
        backend = opened("valkey", key, capacity=400, **options)
        for fingerprint in fps(1000):
            assert backend.add(fingerprint)
        assert len(backend.status().generations) > 2
        clock.now += 1300
        for fingerprint in fps(1000):
            assert backend.add(fingerprint)
        assert len(backend.status().generations) == 1
        backend.close()


class TestOutage:
    def test_a_restarted_server_is_waited_for(self) -> None:
        server = servers.Server("valkey", "--appendonly", "yes", "--appendfsync", "always")
        try:
            backend = opened("valkey", "k", url=server.url, deadline_secs=20)
            for fingerprint in fps(500):
                assert backend.add(fingerprint)
            server.kill()
            server.start()
            for fingerprint in fps(500, 1000):
                assert backend.add(fingerprint)
            assert not any(backend.add(fingerprint) for fingerprint in fps(1000))
            assert backend.status().more["redis/lost_keys"] == 0
            backend.close()
            again = opened("valkey", "k", url=server.url)
            assert not any(again.add(fingerprint) for fingerprint in fps(1000))
            again.close()
        finally:
            server.end()

    def test_a_restarted_server_without_persistence(self, server: servers.Server) -> None:
        backend = opened("valkey", "k", url=server.url, deadline_secs=20)
        for fingerprint in fps(500):
            assert backend.add(fingerprint)
        server.kill()
        server.start()
        assert backend.add(b"new")
        backend.close()
        again = opened("valkey", "k", url=server.url)
        assert not any(again.add(fingerprint) for fingerprint in fps(500))
        again.close()

    def test_after_the_deadline_it_gives_up_and_comes_back(
        self, server: servers.Server, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(INFO)
        backend = opened("valkey", "k", url=server.url, deadline_secs=1)
        backend.add(b"page")
        server.kill()
        begun = time.monotonic()
        with pytest.raises(OutageError) as first:
            backend.add(b"other")
        assert time.monotonic() - begun < 10
        assert not backend.add(b"page")  # the mirror knows it
        with pytest.raises(OutageError) as second:
            backend.add(b"other")
        assert second.value.since == first.value.since  # the same outage
        server.start()
        time.sleep(1.1)
        assert backend.add(b"other")
        assert any("is back after" in line for line in messages(caplog, INFO))
        backend.close()

    def test_known_requests_are_answered_though_a_quarter_is_over(
        self, server: servers.Server
    ) -> None:
        clock = Clock()
        options = {"window_secs": 1000, "clock": clock, "deadline_secs": 0.5}
        backend = opened("valkey", "k", url=server.url, **options)
        assert backend.add(b"page")
        clock.now += 300
        server.kill()
        assert not backend.add(b"page")
        with pytest.raises(OutageError):
            backend.add(b"other")
        server.start()
        time.sleep(1.1)
        backend.close()


class TestBadPlaces:
    def test_a_server_that_repeats_the_password(self, server: servers.Server) -> None:
        """As one does that does not know the command AUTH."""
        password = secrets.token_hex(8)
        with pytest.raises(StorageError) as caught:
            RedisServer(server.url).call(lambda client: client.execute_command("AUHT", password))
        assert "unknown command" in str(caught.value)
        assert password not in "".join(traceback.format_exception(caught.value))

    def test_a_key_of_another_kind(self, key: str) -> None:
        client = servers.shared("valkey").client
        client.set(key, "something")
        with pytest.raises(StorageError, match="WRONGTYPE"):
            opened("valkey", key)
        assert client.get(key) == b"something"

    @pytest.mark.parametrize(
        "fields",
        [
            {"name": "value"},
            {"filter": "no JSON"},
            {"filter": "{}"},
            {"filter": json.dumps({"format": 1})},
            {"a:b:c": "d"},
        ],
    )
    def test_a_hash_that_is_no_filter(self, key: str, fields: dict[str, str]) -> None:
        client = servers.shared("valkey").client
        client.hset(key, mapping=fields)
        with pytest.raises(StorageError, match="no filter of scrapy_bloom.*BLOOM_REDIS_KEY"):
            opened("valkey", key)
        assert client.hgetall(key) == {k.encode(): v.encode() for k, v in fields.items()}

    def test_a_newer_format(self, key: str) -> None:
        opened("valkey", key).close()
        client = servers.shared("valkey").client
        raw = json.loads(client.hget(key, "filter"))
        client.hset(key, "filter", json.dumps({**raw, "format": 2}))
        with pytest.raises(StorageError, match="upgrade scrapy_bloom"):
            opened("valkey", key)

    def test_blocks_of_another_type(self, key: str) -> None:
        backend = opened("valkey", key)
        (generation,) = RedisStore(backend._server, key).read().generations
        client = servers.shared("valkey").client
        client.delete(f"{key}:{generation.id}:0")
        client.lpush(f"{key}:{generation.id}:0", "x")
        with pytest.raises(StorageError, match="WRONGTYPE"):
            backend.add(b"page")
        backend.close()


class CrawlersAgainstDict(RuleBasedStateMachine):
    """Three crawlers on one filter, in any order: beside when each request was recorded."""

    keys = itertools.count()

    @initialize(window=st.sampled_from([0, 1000]), mirrors=st.lists(st.booleans(), min_size=3))
    def start(self, window: int, mirrors: list[bool]) -> None:
        self.clock, self.window, self.mirrors = Clock(), window, mirrors
        self.key = f"machine:{next(self.keys)}"
        self.crawlers = [self.open(number) for number in range(3)]
        self.recorded: dict[bytes, float] = {}
        self.perhaps: set[bytes] = set()  # their keys were lost
        self.unique = 0

    def open(self, number: int) -> RedisBackend:
        return opened(
            "valkey",
            self.key,
            capacity=40,
            window_secs=self.window,
            mirror=self.mirrors[number],
            trust_secs=0.02,
            clock=self.clock,
            in_a_run=False,
        )

    def check(self, fingerprint: bytes, seen: bool) -> None:
        when = self.recorded.get(fingerprint)
        if when is None:
            assert not seen
        elif fingerprint not in self.perhaps:
            age = self.clock.now - when
            if not self.window or age < self.window:
                assert seen
            elif age > 1.25 * self.window:
                assert not seen

    @rule(number=st.integers(0, 2), page=st.integers(0, 200))
    def add(self, number: int, page: int) -> None:
        fingerprint = b"%d" % page
        new = self.crawlers[number].add(fingerprint)
        self.check(fingerprint, not new)
        if new:
            self.recorded[fingerprint] = self.clock.now
            self.perhaps.discard(fingerprint)

    @rule(number=st.integers(0, 2), start=st.integers(0, 200))
    def add_many(self, number: int, start: int) -> None:
        for page in range(start, start + 30):
            self.add(number, page)

    @rule(number=st.integers(0, 2), page=st.integers(0, 200))
    def ask(self, number: int, page: int) -> None:
        fingerprint = b"%d" % page
        self.check(fingerprint, fingerprint in self.crawlers[number])

    @rule(seconds=st.sampled_from([1, 100, 260, 1300]))
    def wait(self, seconds: int) -> None:
        self.clock.now += seconds

    @rule(number=st.integers(0, 2))
    def reopen(self, number: int) -> None:
        self.crawlers[number].close()
        self.crawlers[number] = self.open(number)

    def all_notice(self) -> None:
        for number in range(3):
            self.unique += 1
            self.crawlers[number].add(b"unique %d" % self.unique)

    @rule(number=st.integers(0, 2))
    def clear(self, number: int) -> None:
        self.crawlers[number].clear()
        self.recorded.clear()
        self.perhaps.clear()

    @rule(everything=st.booleans())
    def lose(self, everything: bool) -> None:
        # Who has not heard of a clear() before all is lost writes back what was cleared.
        self.all_notice()
        client = servers.shared("valkey").client
        names = client.keys(f"{self.key}*" if everything else f"{self.key}:*:0")
        if names:
            client.delete(*names)
        self.all_notice()
        self.perhaps = set(self.recorded)

    def teardown(self) -> None:
        for crawler in getattr(self, "crawlers", []):
            crawler.clear()
            crawler.close()


def test_any_sequence_of_uses() -> None:
    run_state_machine_as_test(
        CrawlersAgainstDict, settings=settings(max_examples=60, stateful_step_count=40)
    )
    left_behind = servers.keys_for_good(servers.shared("valkey").client, "machine:*")
    assert left_behind == []
