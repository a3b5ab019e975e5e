"""Time windows of a shared filter, with a clock of our own."""

import pytest

from scrapy_bloom import OutageError
from tests.support import servers
from tests.support.clock import Clock
from tests.support.redis_filters import fps, opened


def test_a_late_count_leaves_nothing_behind(key: str) -> None:
    """A crawler counts for a generation that has expired meanwhile."""
    clock = Clock()
    options = {"window_secs": 1000, "clock": clock}
    first, second = (opened("valkey", key, **options) for _ in range(2))
    assert first.add(b"page")
    clock.now += 3000
    assert second.add(b"page")
    first.close()
    names = servers.shared("valkey").client.hkeys(key)
    assert not [name for name in names if name.endswith(b":1")]
    second.close()


class TestWindows:
    @pytest.mark.parametrize("mirror", [True, False])
    def test_requests_expire_for_all_crawlers(self, key: str, mirror: bool) -> None:
        clock = Clock()
        options = {"window_secs": 1000, "clock": clock, "mirror": mirror, "capacity": 400}
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
        # What has expired is removed.
        assert len(client.keys(f"{{{key}}}:blocks:*")) == generations

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
        backend = opened("valkey", key, window_secs=1000, clock=clock)
        clock.now += 2000
        assert backend.add(b"more")
        backend.close()

    def test_known_requests_are_answered_without_the_server_at_the_end_of_a_quarter(
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
        backend.close()
