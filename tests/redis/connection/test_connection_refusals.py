"""Connections that are refused: at once, with what to do, and without a secret."""

from typing import Any
from urllib.parse import quote

import pytest

from scrapy_bloom import OutageError, SettingError, StorageError
from scrapy_bloom.redis.server import RedisServer
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
        for options in ("", f"?sentinel_password=wrong{SECRET}"):
            message = refusal(f"{own.url}{options}")
            assert "No master found for 'mymaster'; " in message
            assert "?sentinel_username=...&sentinel_password=..." in message
        assert RedisServer(f"{own.url}?sentinel_password={quote(PASSWORD)}").now() > 0
        own.end()

    @pytest.mark.parametrize("program", PROGRAMS)
    def test_a_database_that_is_not_there(self, program: str) -> None:
        url = f"redis://127.0.0.1:{servers.shared(program).port}/99"
        assert "DB index is out of range" in refusal(url)

    HINT = "; redis+cluster:// is for the address of a node of a Cluster, and only for one"

    def test_a_cluster_taken_for_a_single_server(self) -> None:
        def ask(client: Any) -> None:
            for name in "abcdefgh":
                client.get(name)

        message = refusal(servers.shared_cluster().nodes[0].url, ask)
        assert "MovedError: " in message
        assert message.endswith(self.HINT)

    @pytest.mark.parametrize("program", PROGRAMS)
    def test_a_single_server_taken_for_a_cluster(self, program: str) -> None:
        url = f"redis+cluster://127.0.0.1:{servers.shared(program).port}"
        assert refusal(url).endswith(self.HINT)

    @pytest.mark.parametrize("database", ["/1", "?db=1"])
    def test_a_cluster_has_one_database(self, database: str) -> None:
        server = RedisServer(servers.shared_cluster().url + database)
        assert "a Cluster has only database 0" in failure(server.now, SettingError)

    HINT_2 = "; redis+sentinel:// is for the address of a Sentinel, and only for one"

    @pytest.mark.parametrize("program", PROGRAMS)
    def test_a_sentinel_that_is_none(self, program: str) -> None:
        url = f"redis+sentinel://127.0.0.1:{servers.shared(program).port}/mymaster"
        assert refusal(url).endswith(self.HINT_2)

    @pytest.mark.parametrize("program", PROGRAMS)
    def test_a_sentinel_taken_for_a_server(self, program: str) -> None:
        assert refusal(service(program).sentinel.url).endswith(self.HINT_2)

    @pytest.mark.parametrize("program", PROGRAMS)
    def test_a_service_that_the_sentinel_does_not_know(self, program: str) -> None:
        # It is the same while it fails over: this is waited for.
        url = service(program).url.replace("mymaster", "other")
        server = RedisServer(url, deadline_secs=0.5)
        message = failure(server.now, OutageError)
        assert "No master found for 'other'" in message

    @pytest.mark.parametrize("kind", ["single", "sentinel", "cluster"])
    def test_unknown_options(self, kind: str) -> None:
        url = {
            "single": servers.shared("valkey").url,
            "sentinel": service("valkey").url,
            "cluster": servers.shared_cluster().url,
        }[kind]
        expected = SettingError if kind == "cluster" else StorageError
        params = {"wrong_option": SECRET}
        for server in (
            RedisServer(f"{url}?wrong_option={SECRET}"),
            RedisServer(url, params=params),
        ):
            message = failure(server.now, expected)
            assert "wrong_option" in message
            assert "BLOOM_REDIS_URL" in message
            assert "REDIS_PARAMS" in message

    @pytest.mark.parametrize("option", ["socket_timeout", "sentinel_socket_timeout"])
    def test_wrong_values_of_options(self, option: str) -> None:
        server = RedisServer(f"{service('valkey').url}?{option}={SECRET}")
        message = failure(server.now, SettingError)
        assert option in message
        assert message.startswith(f"the URL {service('valkey').url} is not valid: ")

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
