"""The place of a filter or a list: a path, or the URL of a server; anything else is refused."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import servers
from tests.support.cli import Ran, bloom
from tests.support.request_queues import begun
from tests.support.workspace import (
    fingerprints,
    make_filter,
    shared_filter,
    start_project,
    urls,
    write_urls,
)

SECRET = "hushhush"


@pytest.fixture(scope="module")
def locked() -> Iterator[servers.Server]:
    server = servers.Server("valkey", "--requirepass", SECRET)
    yield server
    server.end()


def test_a_password_among_the_options_of_a_url_is_never_printed(
    locked: servers.Server, tmp_path: Path
) -> None:
    for ran in run_each(f"{locked.url}?password={SECRET}", tmp_path):
        assert ran.status == 0, ran


EACH_COMMAND = [
    ("copy", "filter", "URL"),
    ("info", "URL"),
    ("check", "URL", "urls.txt"),
    ("import", "urls.txt", "URL"),
    ("report", "URL", "-o", "page.html", "--overwrite"),
    ("copy", "URL", "copy"),
    ("reset", "URL", "--yes"),
]


def run_each(place: str, cwd: Path) -> list[Ran]:
    """Run each command with that place, where all that they need is there."""
    if not (cwd / "filter").exists():
        make_filter(cwd / "filter", fingerprints(urls(range(9))))
        write_urls(cwd / "urls.txt", urls(range(5)))
    ran = []
    for command in EACH_COMMAND:
        arguments = [f"{place}#shop:bloom" if entry == "URL" else entry for entry in command]
        ran.append(bloom(*arguments, cwd=cwd))
        assert SECRET not in ran[-1].out + ran[-1].err
    shutil.rmtree(cwd / "copy", ignore_errors=True)
    return ran


@pytest.mark.parametrize(
    "settings",
    [
        "BLOOM_REDIS_URL = 'redis://:{secret}@127.0.0.1:{port}/0?socket_timeout=30'",
        "REDIS_PARAMS = {{'password': '{secret}', 'host': '127.0.0.1', 'port': {port}}}",
    ],
)
def test_the_server_of_the_project(settings: str, locked: servers.Server, project: Path) -> None:
    """It needs no URL, and its password goes to no other server."""
    with (project / "shopping/settings.py").open("a") as file:
        file.write("\n" + settings.format(secret=SECRET, port=locked.port) + "\n")
    for ran in run_each("redis", project):
        assert ran.status == 0, ran
    error = bloom("info", f"redis://127.0.0.1:{locked.port}/3#k", cwd=project).error
    assert "Authentication required" in error or "invalid username-password" in error
    assert "REDISCLI_AUTH" in error  # what to do about it
    wrong = bloom("info", f"{locked.url.replace('//', '//:wrong@')}#k", cwd=project)
    assert "invalid username-password pair" in wrong.error


def test_sentinels(project: Path) -> None:
    """Named by the project, with a password for their servers."""
    own = servers.Service()
    for server in own.servers:
        server.client.config_set("requirepass", SECRET)
    set_in(project, BLOOM_REDIS_URL=own.url.replace("//", f"//:{SECRET}@") + "?socket_timeout=30")
    for ran in run_each("redis", project):
        assert ran.status == 0, ran
    alone = bloom("info", f"{own.url}#k", "-s", "BLOOM_REDIS_URL=", cwd=project)
    assert "Authentication required" in alone.error
    own.end()


def test_the_password_of_redis_cli(locked: servers.Server, tmp_path: Path) -> None:
    make_filter(tmp_path / "filter", fingerprints(urls(range(9))))

    def copy(url: str, password: str) -> Ran:
        under = ("env", f"REDISCLI_AUTH={password}")
        return bloom("copy", "filter", f"{url}#cli-{password}", cwd=tmp_path, under=under)

    assert copy(locked.url, SECRET).status == 0
    assert "invalid username-password" in copy(locked.url, "wrong").error
    with_password = locked.url.replace("//", f"//:{SECRET}@")  # it counts more
    assert copy(with_password, "wrong").status == 0


def test_a_directory_named_redis(tmp_path: Path) -> None:
    make_filter(tmp_path / "redis", fingerprints(urls(range(9))))
    assert bloom("info", "./redis", "--json", cwd=tmp_path).json["recorded"] == 9


SPIDER = "import scrapy\nclass Shop(scrapy.Spider):\n    name = 'shop'\n    custom_settings = {0}\n"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return start_project(tmp_path / "work")


def set_in(project: Path, **settings: object) -> None:
    lines = "".join(f"{name} = {value!r}\n" for name, value in settings.items())
    with (project / "shopping/settings.py").open("a") as file:
        file.write("\n" + lines)


def recorded(project: Path, *options: str) -> int:
    return int(bloom("info", *options, "--json", cwd=project).json["recorded"])


def test_the_server(project: Path) -> None:
    server, key = servers.shared("valkey"), f"{project.parent.name}:bloom"
    set_in(project, BLOOM_REDIS_URL=f"{server.url}?socket_timeout=30", BLOOM_REDIS_KEY=key)
    shared_filter(server, key, fingerprints(urls(range(7))))
    assert recorded(project) == 7
    assert recorded(project, f"redis#{key}") == 7
    assert "has no queue" in bloom("stop", cwd=project).error
    assert "Deleted the filter" in bloom("reset", "--yes", cwd=project).out


def test_the_jobdir_of_a_spider(project: Path) -> None:
    make_filter(project / "jobs/shop", fingerprints(urls(range(5))))
    (project / "shopping/spiders/shop.py").write_text(SPIDER.format({"JOBDIR": "jobs/shop"}))
    assert recorded(project, "--spider", "shop") == 5
    page = bloom("report", "--spider", "shop", "-o", "page.html", cwd=project)
    assert page.status == 0, page


def test_the_jobdir(project: Path) -> None:
    (project / "job").mkdir()
    begun(project / "job/bloom.sqlite").close()
    set_in(project, JOBDIR="job")
    assert bloom("queue", "--json", cwd=project).json["location"] == "job"
    make_filter(project / "job", fingerprints(urls(range(3))))
    assert recorded(project) == 3
