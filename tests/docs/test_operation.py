"""The pages on operation: what starts a crawl pauses and resumes it, and alerts have metrics."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.cli import bloom
from tests.support.crawls import LIMIT, Crawl
from tests.support.documents import BLOCK, page
from tests.support.servers import wait_for
from tests.support.sites import Site, tree_site
from tests.support.workspace import in_redis

PROJECT = """
DUPEFILTER_CLASS = "scrapy_bloom.BloomDupeFilter"
SCHEDULER = "scrapy_bloom.CrashSafeScheduler"
SPIDER_MODULES = ["spider"]
CONCURRENT_REQUESTS = 2
"""
SPIDER = """
import scrapy

class Shop(scrapy.Spider):
    name = "shop"
    start_urls = ["{url}"]

    def parse(self, response):
        yield from response.follow_all(css="a")
"""


def block(name: str, language: str) -> str:
    (code,) = [code for found, code in BLOCK.findall(page(name)) if found == language]
    return code


def commands() -> dict[str, list[str]]:
    """Return the command of each way to deploy a crawl."""
    (unit,) = re.findall(r"^ExecStart=\S+/(scrapy .+)$", block("deploy.md", "ini"), re.MULTILINE)
    image = block("deploy.md", "dockerfile")
    job = yaml.safe_load(block("deploy.md", "yaml"))["spec"]["jobTemplate"]["spec"]["template"]
    return {
        "systemd": shlex.split(unit),
        "docker": json.loads(image.rpartition("\nCMD ")[2]),
        "kubernetes": job["spec"]["containers"][0]["command"],
    }


@pytest.mark.parametrize("way", ["systemd, docker", "kubernetes"])
def test_each_way_to_deploy_pauses_and_resumes_the_crawl(way: str, tmp_path: Path) -> None:
    found = [
        [re.sub(r"JOBDIR=\S+/shop", "JOBDIR=job", word) for word in commands()[each_word]]
        for each_word in way.split(", ")
    ]
    command = found[0]
    assert all(entry == command for entry in found)
    programs = os.pathsep.join([os.fspath(Path(sys.executable).parent), os.environ["PATH"]])
    with tree_site(20) as site:
        (tmp_path / "scrapy.cfg").write_text("[settings]\ndefault = settings\n")
        (tmp_path / "settings.py").write_text(PROJECT)
        (tmp_path / "spider.py").write_text(SPIDER.format(url=site.url))

        log = (tmp_path / "log").open("w")
        options = {"cwd": tmp_path, "env": {**os.environ, "PATH": programs}, "stderr": log}
        site.hold_after(5)
        with log, subprocess.Popen(command, **options) as process:
            wait_for(site.is_holding, (tmp_path / "log").read_text)
            process.send_signal(signal.SIGTERM)
            wait_for(lambda: "SIGTERM" in (tmp_path / "log").read_text(), lambda: "no signal")
            site.release()
            assert process.wait(LIMIT) == 0
            assert "'finish_reason': 'shutdown'" in (tmp_path / "log").read_text()
            assert len(site.hits) < 20
            assert subprocess.run(command, **options, timeout=LIMIT, check=False).returncode == 0
        assert "'finish_reason': 'finished'" in (tmp_path / "log").read_text()
    assert len(site.hits) == 20
    assert [page for page, hits in site.hits.items() if hits > 1] == ["/p/0"]  # the start page


def test_the_alerts_have_metrics(wide: Site, tmp_path: Path, key: str) -> None:
    place = in_redis(key, SCHEDULER="scrapy_bloom.CrashSafeScheduler")
    crawl = Crawl.held(wide, 8, tmp_path, place)
    url = str(place["BLOOM_REDIS_URL"])
    ran = bloom("info", f"{url}#{key}", "--format", "prometheus", cwd=tmp_path)
    crawl.kill()
    metrics = set(re.findall(r"^(scrapy_bloom_\w+)\{", ran.out, re.MULTILINE))
    (group,) = yaml.safe_load(block("alerts.md", "yaml"))["groups"]
    names = [
        name for rule in group["rules"] for name in re.findall(r"scrapy_bloom_\w+", rule["expr"])
    ]
    assert len(names) > 8
    assert set(names) <= metrics
    assert all({"alert", "expr"} <= rule.keys() for rule in group["rules"])
