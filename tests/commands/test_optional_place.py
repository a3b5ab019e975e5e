"""The place of a command that names none: that of the project's crawl."""

from pathlib import Path

import pytest

from tests.support import servers
from tests.support.cli import bloom
from tests.support.request_queues import begun
from tests.support.workspace import (
    fingerprints,
    in_redis,
    make_filter,
    shared_filter,
    start_project,
    urls,
)

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
    settings = {**in_redis(key), "BLOOM_REDIS_URL": f"{server.url}?socket_timeout=30"}
    set_in(project, **settings)
    shared_filter(server, key, fingerprints(urls(range(7))))
    assert recorded(project) == 7
    assert recorded(project, "--key", key) == 7
    assert key in {each["key"] for each in bloom("ls", "--json", cwd=project).json["filters"]}
    assert "has no queue" in bloom("stop", cwd=project).error
    assert "Deleted the filter" in bloom("reset", "--yes", cwd=project).out


def test_the_bloom_dir_of_a_spider(project: Path) -> None:
    make_filter(project / "filters/shop", fingerprints(urls(range(5))))
    (project / "shopping/spiders/shop.py").write_text(
        SPIDER.format({"BLOOM_DIR": "filters/%(spider)s"})
    )
    assert recorded(project, "--spider", "shop") == 5
    page = bloom("report", "--spider", "shop", "-o", "page.html", cwd=project)
    assert page.status == 0, page
    files = "the filter of this project is in files"
    set_in(project, BLOOM_DIR="filters/%(spider)s")
    assert "which spider? Give --spider: BLOOM_DIR is " in bloom("info", cwd=project).err
    set_in(project, BLOOM_DIR="filters/shop")
    assert files in bloom("ls", cwd=project).err
    assert "says which filter in Redis is meant" in bloom("info", "--key", "k", cwd=project).err


def test_the_jobdir(project: Path) -> None:
    (project / "job").mkdir()
    begun(project / "job/requests.sqlite").close()
    set_in(project, JOBDIR="job", BLOOM_DIR="filters/shop")
    assert bloom("queue", "--json", cwd=project).json["location"] == "job"
    set_in(project, BLOOM_DIR=None)
    make_filter(project / "job/bloom", fingerprints(urls(range(3))))
    assert recorded(project) == 3


def test_none(tmp_path: Path) -> None:
    for command in ("info", "queue", "ls"):
        ran = bloom(command, cwd=tmp_path)
        assert ran.status == 2
        assert 'neither BLOOM_BACKEND = "redis" nor BLOOM_DIR nor JOBDIR' in ran.err
