"""URLs of servers: what is shown of them, and what is not valid."""

from pathlib import Path

import pytest

from scrapy_bloom import SettingError
from scrapy_bloom.redis.server import RedisServer
from scrapy_bloom.redis.url import SCHEMES, ServerURL
from tests.support.connections import SECRET, check_tells_nothing, failure
from tests.support.crawls import run_script


class TestURLs:
    @pytest.mark.parametrize(
        ("url", "shown"),
        [
            ("redis://", "redis://"),
            ("redis:///5", "redis:///5"),
            ("redis://host", "redis://host"),
            (f"redis://:{SECRET}@host:6379/", "redis://host:6379/"),
            (f"redis://me:{SECRET}@[::1]:6379/0?socket_timeout=1", "redis://[::1]:6379/0"),
            (f"redis://me:{SECRET}@x@host.example", "redis://host.example"),
            (f"redis+cluster://:{SECRET}@host", "redis+cluster://host"),
            (f"rediss+cluster://a:{SECRET}@[::1]:1/0?db=0", "rediss+cluster://[::1]:1/0"),
            (f"redis+sentinel://:{SECRET}@a/s", "redis+sentinel://a/s"),
            (
                f"rediss+sentinel://me:{SECRET}@a_1:1,b-2,[::1]:3/S.1-a_b/7?sentinel_password={SECRET}",
                "rediss+sentinel://a_1:1,b-2,[::1]:3/S.1-a_b/7",
            ),
            (f"unix:///run/redis.sock?password={SECRET}", "unix:///run/redis.sock"),
            (f"unix://me:{SECRET}@/run/a@b.sock?db=1", "unix:///run/a@b.sock"),
        ],
    )
    def test_without_secrets(self, url: str, shown: str) -> None:
        parsed = ServerURL.parsed(url)
        assert parsed.address == shown
        assert parsed.text == url
        assert SECRET not in f"{parsed} {parsed!r}"

    @pytest.mark.parametrize(
        "url",
        [
            *("", SECRET, f"redis:{SECRET}", f"{SECRET}@redis://host", f"http://{SECRET}@host"),
            *(f"redis://:{SECRET}", f"redis://host:{SECRET}/0", f"redis://host/{SECRET}"),
            *(f"redis://:a/{SECRET}@host", f"redis://:1/{SECRET}@host:6379/0"),
            *(f"redis://:1?{SECRET}@host", f"redis://:1#{SECRET}@host:6379/0"),
            *(f"redis://u:{SECRET}@a?b@host", f"redis://:[{SECRET}@host", f"redis://:{SECRET}]@h"),
            *(f"redis://:\u2100{SECRET}@host", f"redis://:{SECRET}\n@host", "redis://host/0\n"),
            *(f"unix://{SECRET}/run/sock", "unix://", f"unix://:a/{SECRET}#@/run/sock"),
            *(f"REDIS://:{SECRET}@host", f"redis://:{SECRET}@host:0x1", f"redis://:{SECRET}@ho st"),
            *(f"redis://:{SECRET}@host:99999/0", f"redis://:{SECRET}@a,b/0"),
            *(f"redis+cluster://:{SECRET}@a,b", f"redis+cluster://h/{SECRET}"),
            *(f"redis+cluster:{SECRET}@h", f"redis+cluster://:a/{SECRET}@h"),
            *(f"redis+sentinel://:{SECRET}@a,b", f"redis+sentinel://:{SECRET}@a,b/0/svc"),
            *(f"redis+sentinel://:{SECRET}@a,,b/s", f"redis+sentinel://:{SECRET}@a:70000/s"),
            *(f"redis+sentinel://:1/{SECRET}@a/s", f"redis+sentinel://:a?{SECRET}@b/s"),
            *(f"redis+sentinel://a/s%{SECRET}", f"redis+sentinel://:{SECRET}@a/s/0/1"),
            *(f"unix+sentinel://:{SECRET}@/run/sock", f"redis+tls://:{SECRET}@h"),
        ],
    )
    def test_nothing_is_shown_of_what_is_not_valid(self, url: str) -> None:
        """But the form of a valid URL with that scheme, or of all."""
        with pytest.raises(ValueError, match=r"://\[\[user\]:password@\]") as caught:
            ServerURL.parsed(url)
        check_tells_nothing(caught.value)
        message = failure(lambda: RedisServer(url), SettingError)
        scheme = url.partition("://")[0]
        form = f"{scheme if scheme in SCHEMES else 'redis'}://[[user]:password@]"
        assert message.startswith(f"the URL of Redis is not valid; use {form}")
        assert message.endswith("with special characters percent-encoded")

    def test_no_connection_before_the_first_call(self, tmp_path: Path) -> None:
        code = """
            import sys
            from scrapy_bloom.redis.server import RedisServer
            server = RedisServer("redis://127.0.0.1:1/0")
            server.close()
            assert "redis" not in sys.modules
        """
        assert run_script(code, cwd=tmp_path).returncode == 0

    def test_without_redis_py(self, tmp_path: Path) -> None:
        code = """
            import sys
            sys.modules["redis"] = None
            from scrapy_bloom import SettingError
            from scrapy_bloom.redis.server import RedisServer
            try:
                RedisServer("redis://127.0.0.1:1/0").now()
            except SettingError as error:
                print(error)
        """
        (line,) = run_script(code, cwd=tmp_path).stdout.splitlines()
        assert (
            "needs redis-py 6.1 or later and msgpack, which are not installed: "
            "pip install 'redis[hiredis]>=6.1' msgpack" in line
        )
