"""Commands of Scrapy without a crawl leave the filter and the job of the project alone."""

from pathlib import Path

import pytest

from tests.support import servers
from tests.support.cli import scrapy
from tests.support.sites import Site
from tests.support.workspace import contents, in_redis

PAGES = 7  # of the tree

SPIDER = """
import scrapy

class Docs(scrapy.Spider):
    name = "docs"

    async def start(self):
        yield scrapy.Request(self.settings["URL"])

    def parse(self, response):
        '''Follow all links.

        @url %(url)s
        @returns requests 1
        '''
        yield {"url": response.url}
        yield from response.follow_all(css="a")
"""
SETTINGS = """
SPIDER_MODULES = ["pages"]
DUPEFILTER_CLASS = "scrapy_bloom.BloomDupeFilter"
TELNETCONSOLE_ENABLED = False
REMOTE_CONTROL_ENABLED = False
DOWNLOAD_DELAY = 0
LOG_LEVEL = "INFO"
URL = %(url)r
"""


@pytest.fixture
def project(tmp_path: Path, tree: Site) -> Path:
    values = {"url": tree.url}
    (tmp_path / "scrapy.cfg").write_text("[settings]\ndefault = project\n")
    (tmp_path / "project.py").write_text(SETTINGS % values)
    (tmp_path / "pages.py").write_text(SPIDER % values)
    return tmp_path


def run(project: Path, *arguments: str, **settings: object) -> tuple[int, str]:
    options = [arg for name, value in settings.items() for arg in ("-s", f"{name}={value}")]
    ran = scrapy(*arguments, *options, cwd=project)
    return ran.status, ran.out + ran.err


def test_what_is_tried_by_hand_is_crawled_by_the_next_run(project: Path, tree: Site) -> None:
    key = project.as_posix()
    shared = in_redis(key)

    def stored() -> dict[bytes, bytes]:
        return servers.shared("valkey").client.hgetall(key)

    for command in (
        ("parse", f"{tree.url}p/1?b=1&a=2", "--spider=docs", "--depth=2", "--nocolour"),
        ("fetch", f"{tree.url}p/2?b=1&a=2"),
        ("check", "docs"),
    ):
        status, output = run(project, *command, **shared, LOG_LEVEL="DEBUG")
        assert status == 0, output
        assert "Known duplicates are dropped" not in output
        assert "p/3" in output or "p/5" in output or "Ran 1 contract" in output
        assert not stored()
    tree.forget()
    status, output = run(project, "crawl", "docs", **shared, LOG_LEVEL="DEBUG")
    assert status == 0, output
    assert "Known duplicates are dropped before the spider middlewares" in output
    assert len(tree.hits) == PAGES  # /p/0 is the start page, too
    before = stored()
    assert before
    run(project, "parse", f"{tree.url}p/9", "--spider=docs", **shared)
    assert stored() == before


@pytest.mark.parametrize("scheduler", ["Scrapy's", "scrapy_bloom.CrashSafeScheduler"])
def test_a_paused_job_is_left_alone(project: Path, tree: Site, scheduler: str) -> None:
    settings = {} if scheduler == "Scrapy's" else {"SCHEDULER": scheduler}
    (project / "job").mkdir()
    status, output = run(
        project, "crawl", "docs", JOBDIR="job", CLOSESPIDER_PAGECOUNT=1, **settings
    )
    assert status == 0, output
    before = contents(project / "job")
    tree.forget()
    for name, *command in (
        ("parse", "parse", "--spider=docs"),
        ("fetch", "fetch"),
        ("fetch", "view"),
    ):
        ask = (*command, f"{tree.url}p/6")
        _, output = run(project, *ask, JOBDIR="job", BROWSER="true", **settings)
        assert f"scrapy {name} does not work with a job directory" in output
        assert "start it with -s JOBDIR=" in output
        assert contents(project / "job") == before
    assert not tree.hits
    status, output = run(project, "fetch", f"{tree.url}p/6", JOBDIR="", **settings)
    assert status == 0, output
    assert tree.hits == {"/p/6": 1}
    status, output = run(project, "crawl", "docs", JOBDIR="job", **settings)
    assert status == 0, output
    assert len(tree.hits) >= 6
