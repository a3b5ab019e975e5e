"""While Redis is away, the log says so at once; commands do not wait for it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import servers
from tests.support.cli import bloom

PAGES = 150


@pytest.fixture
def server() -> Iterator[servers.Server]:
    server = servers.Server("valkey", "--requirepass", "geheim")
    yield server
    server.end()


@pytest.mark.parametrize("is_there", [False, True], ids=["refused", "silent"])
def test_a_command_does_not_wait_for_long(
    server: servers.Server, tmp_path: Path, is_there: bool
) -> None:
    url = f"redis://:geheim@127.0.0.1:{server.port}/0"
    (tmp_path / "urls").write_text("https://shop.example/\n")
    if is_there:
        server.pause()
    else:
        server.kill()
    for arguments in (["info", url], ["import", "urls", url]):
        ran = bloom(*arguments, "--key", "shop:bloom", cwd=tmp_path)
        assert "(waited up to 1.5 seconds, BLOOM_REDIS_DEADLINE_SECS)" in ran.error
        assert ran.err.count("\n") == 1
        assert "geheim" not in ran.err
    if is_there:
        server.go_on()
