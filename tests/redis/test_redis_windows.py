"""Time windows of a shared filter, with a clock of our own."""

import pytest

from scrapy_bloom import OutageError
from tests.support import servers
from tests.support.clock import Clock
from tests.support.redis_filters import opened


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
