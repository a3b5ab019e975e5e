"""A filter whose server goes away and comes back."""

import time

import pytest

from scrapy_bloom import (
    OutageError,
)
from tests.support import servers
from tests.support.clock import Clock
from tests.support.redis_filters import INFO, messages, opened


class TestOutage:
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
