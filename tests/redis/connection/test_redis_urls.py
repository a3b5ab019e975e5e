"""URLs of servers: what is shown of them, and what is not valid."""

import subprocess
import sys
import textwrap

import pytest

from scrapy_bloom import SettingError
from scrapy_bloom.redis.connection.client import without_secrets
from scrapy_bloom.redis.connection.server import RedisServer
from tests.support.connections import SECRET, check_tells_nothing, failure


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
            (f"rediss://me:{SECRET}@a_1:1,b-2,c:3/7", "rediss://a_1:1,b-2,c:3/7"),
            (f"unix:///run/redis.sock?password={SECRET}", "unix:///run/redis.sock"),
            (f"unix://me:{SECRET}@/run/a@b.sock?db=1", "unix:///run/a@b.sock"),
        ],
    )
    def test_without_secrets(self, url: str, shown: str) -> None:
        assert without_secrets(url) == shown

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
        ],
    )
    def test_nothing_is_shown_of_what_is_not_valid(self, url: str) -> None:
        with pytest.raises(ValueError, match=r"^redis://\[\[user\]:password@\]host") as caught:
            without_secrets(url)
        check_tells_nothing(caught.value)
        message = failure(lambda: RedisServer(url), SettingError)
        assert message.startswith("the URL of Redis is not valid: redis://[[user]:password@]host")
        assert "percent-encoded" in message

    def test_ports(self) -> None:
        url = f"redis://:{SECRET}@host:99999/0"
        assert "Port out of range" in failure(lambda: RedisServer(url), SettingError)

    def test_combinations(self) -> None:
        for options in ({"cluster": True}, {"sentinel": "mymaster"}):
            message = failure(lambda o=options: RedisServer("unix:///run/sock", **o), SettingError)
            assert "needs redis:// or rediss://" in message
        for options in ({"cluster": True}, {}):
            message = failure(lambda o=options: RedisServer("redis://a,b", **o), SettingError)
            assert "BLOOM_REDIS_SENTINEL" in message

    def test_no_connection_before_the_first_call(self) -> None:
        code = """
            import sys
            from scrapy_bloom.redis.connection.server import RedisServer
            server = RedisServer("redis://127.0.0.1:1/0")
            server.close()
            assert "redis" not in sys.modules
        """
        subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=60)

    def test_without_redis_py(self) -> None:
        code = """
            import sys
            sys.modules["redis"] = None
            from scrapy_bloom import SettingError
            from scrapy_bloom.redis.connection.server import RedisServer
            try:
                RedisServer("redis://127.0.0.1:1/0").now()
            except SettingError as error:
                print(error)
        """
        command = [sys.executable, "-c", textwrap.dedent(code)]
        output = subprocess.run(command, check=True, timeout=60, stdout=subprocess.PIPE).stdout
        (line,) = output.decode().splitlines()
        assert (
            "redis-py 6.1 or later, which is not installed: pip install 'redis[hiredis]>=6.1'"
            in line
        )
