"""Connections that are refused: at once, with what to do, and without a secret."""

from typing import Any
from urllib.parse import quote

import pytest

from scrapy_bloom import OutageError, SettingError, StorageError
from scrapy_bloom.redis.connection.server import RedisServer
from tests.support import servers
from tests.support.connections import (
    LOGIN_HINT,
    PASSWORD,
    PROGRAMS,
    SECRET,
    USER,
    failure,
    locked,
    refusal,
    service,
)


class TestRefusals:
    """Each at once, however long the deadline: it would be the same a little later."""

    @pytest.mark.parametrize("program", PROGRAMS)
    @pytest.mark.parametrize(
        "login",
        [
            f"{quote(USER, safe='')}:wrong{SECRET}@",
            f"nobody:{SECRET}@",
            "",
        ],
    )
    def test_login(self, program: str, login: str) -> None:
        message = refusal(f"redis://{login}127.0.0.1:{locked(program).port}/0")
        assert message.endswith(LOGIN_HINT)

    def test_login_of_the_sentinel(self) -> None:
        own = servers.Service()
        admin = own.sentinel.client
        admin.execute_command("ACL", "SETUSER", "default", "resetpass", f">{PASSWORD}")
        for params in ({}, {"sentinel_kwargs": {"password": f"wrong{SECRET}"}}):
            message = refusal(own.url, sentinel="mymaster", params=params)
            assert "No master found for 'mymaster'; " in message
            assert "REDIS_PARAMS (sentinel_kwargs)" in message
        params = {"sentinel_kwargs": {"password": PASSWORD}}
        assert RedisServer(own.url, sentinel="mymaster", params=params).now() > 0
        own.end()

    @pytest.mark.parametrize("program", PROGRAMS)
    def test_a_database_that_is_not_there(self, program: str) -> None:
        url = f"redis://127.0.0.1:{servers.shared(program).port}/99"
        assert "DB index is out of range" in refusal(url)

    HINT = "; BLOOM_REDIS_CLUSTER = True is for a Cluster, and only for one"

    def test_a_cluster_taken_for_a_single_server(self) -> None:
        def ask(client: Any) -> None:
            for name in "abcdefgh":
                client.get(name)

        message = refusal(servers.shared_cluster().url, ask)
        assert "MovedError: " in message
        assert message.endswith(self.HINT)

    def test_a_cluster_has_one_database(self) -> None:
        server = RedisServer(servers.shared_cluster().url + "/1", cluster=True)
        assert "a Cluster has only database 0" in failure(server.now, SettingError)

    HINT_2 = "; BLOOM_REDIS_SENTINEL is for the URL of a Sentinel, and only for one"

    @pytest.mark.parametrize("program", PROGRAMS)
    def test_a_sentinel_that_is_none(self, program: str) -> None:
        assert refusal(servers.shared(program).url, sentinel="mymaster").endswith(self.HINT_2)

    @pytest.mark.parametrize("program", PROGRAMS)
    def test_a_sentinel_taken_for_a_server(self, program: str) -> None:
        assert refusal(service(program).url).endswith(self.HINT_2)

    @pytest.mark.parametrize("program", PROGRAMS)
    def test_a_service_that_the_sentinel_does_not_know(self, program: str) -> None:
        # It is the same while it fails over: this is waited for.
        server = RedisServer(service(program).url, sentinel="other", deadline_secs=0.5)
        message = failure(server.now, OutageError)
        assert "No master found for 'other'" in message

    @pytest.mark.parametrize("kind", ["single", "sentinel", "cluster"])
    def test_unknown_options(self, kind: str) -> None:
        url, options = {
            "single": (servers.shared("valkey").url, {}),
            "sentinel": (service("valkey").url, {"sentinel": "mymaster"}),
            "cluster": (servers.shared_cluster().url, {"cluster": True}),
        }[kind]
        expected = SettingError if kind == "cluster" else StorageError
        params = {"wrong_option": SECRET}
        for server in (
            RedisServer(f"{url}?wrong_option={SECRET}", **options),
            RedisServer(url, params=params, **options),
        ):
            message = failure(server.now, expected)
            assert "wrong_option" in message
            assert "BLOOM_REDIS_URL" in message
            assert "REDIS_PARAMS" in message

    def test_errors_in_pipelines_do_not_show_the_commands(self, key: str) -> None:
        def do(client: Any) -> None:
            pipeline = client.pipeline(transaction=False)
            pipeline.set(key, "x")
            pipeline.hset(key, "filter", '{"salt": "a secret of another kind"}')
            pipeline.execute()

        message = refusal(servers.shared("valkey").url, do)
        assert "ResponseError: WRONGTYPE" in message
        assert "salt" not in message

    def test_a_server_that_repeats_the_password(self) -> None:
        """As one does that does not know the command AUTH."""
        message = refusal(
            servers.shared("valkey").url, lambda client: client.execute_command("AUHT", SECRET)
        )
        assert "unknown command" in message

    def test_our_own_errors_pass_as_they_are(self) -> None:
        def refuse(client: object) -> None:
            raise SettingError("as it is")

        server = RedisServer(servers.shared("valkey").url)
        assert failure(lambda: server.call(refuse), SettingError) == "as it is"
