"""The example project, run as its reader runs it."""

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from crawls import LIMIT
from example.site import ARTICLES, SECTIONS, page_count, status_of
from scrapy_bloom.files.header import FileGeneration
from servers import free_port
from sites import Site, tree_site

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "example_project"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    shutil.copytree(EXAMPLE, tmp_path / "example_project", ignore=shutil.ignore_patterns("job*"))
    return tmp_path / "example_project"


def scrapy(project: Path, *args: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "scrapy", *args],
        cwd=project,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(project: Path, *args: str) -> tuple[int, str]:
    process = scrapy(project, *args)
    try:
        output, _ = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        raise AssertionError(output) from None
    return process.returncode, output


def figure(output: str, name: str) -> float:
    found = re.search(rf"^  {re.escape(name)} +([\d,.e-]+)", output, re.MULTILINE)
    assert found, output
    return float(found[1].replace(",", ""))


def pages(output: str) -> int:
    found = re.search(r"^Crawl \w+: ([\d,]+) pages in this run", output, re.MULTILINE)
    assert found, output
    return int(found[1].replace(",", ""))


def test_the_site_has_what_real_sites_have() -> None:
    statuses = [status_of(number) for number in range(SECTIONS * ARTICLES)]
    assert 2000 < page_count() < 5000
    assert statuses.count(404) > 10
    assert statuses.count(500) > 10


def test_a_crawl_paused_with_ctrl_c_goes_on_with_the_same_command(project: Path) -> None:
    command = ("crawl", "docs", "-s", "JOBDIR=job")
    # At first so slow that it cannot be done before it is interrupted.
    process = scrapy(project, *command, "-s", "DOWNLOAD_DELAY=0.05")
    filter_file = project / "job/bloom/generation-0001.bloom"
    end = time.monotonic() + LIMIT
    while not filter_file.exists() or FileGeneration.at(filter_file).count < 500:
        assert time.monotonic() < end
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    first, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, first
    assert "Crawl shutdown:" in first
    assert "Paused. The same command goes on from here." in first
    assert (project / "job/requests.sqlite").exists()  # the queue survives a kill, too
    status, second = run(project, *command)
    assert status == 0, second
    assert "Crawl finished:" in second
    assert 0 < pages(first) < page_count()
    assert pages(first) + pages(second) == page_count()
    assert figure(first, "duplicates filtered") + figure(second, "duplicates filtered") > 20_000
    recorded = figure(second, "requests recorded")
    assert page_count() < recorded < 5000
    assert figure(second, "Scrapy's own filter") == recorded * 91
    assert figure(second, "Bloom filter") < recorded * 91 / 10
    assert 0 < figure(second, "error rate now") < 1e-6
    assert 0 < figure(second, "pages lost, expected") < 1e-2


TERMINALS = re.compile(r"^\| \d \| `(.+)` \|$", re.MULTILINE)


@pytest.fixture
def terminals(project: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """One for each command of the page, where it is run as it stands there."""
    first, *workers = TERMINALS.findall((ROOT / "docs/scaling.md").read_text())
    programs = Path(sys.executable).parent
    known = {**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    known["EXAMPLE_PORT"] = str(free_port())  # on this machine, others may run it now
    started = []

    def start(command: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command.split(),
            cwd=project,
            env=known,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(process)
        return process

    server = start(first)
    limit = threading.Timer(LIMIT, server.kill)
    limit.start()
    assert server.stdout
    assert "start workers" in server.stdout.readline()
    limit.cancel()
    yield [start(each) for each in workers]
    for process in started[1:]:
        process.kill()
        process.communicate()
    server.communicate("\n", timeout=LIMIT)
    assert server.returncode == 0


def test_two_workers_share_a_crawl(terminals: list[subprocess.Popen[str]]) -> None:
    assert len(terminals) == 2
    outputs = [each.communicate(timeout=LIMIT)[0] for each in terminals]
    assert all("Crawl finished:" in output for output in outputs), outputs
    assert all(pages(output) > 0 for output in outputs)
    assert sum(map(pages, outputs)) == page_count()
    assert sum("Spider closed (finished)" in output for output in outputs) == 2


@pytest.fixture
def other_site() -> Iterator[Site]:
    site = tree_site(pages=30)
    yield site
    site.end()


def test_another_site(project: Path, other_site: Site) -> None:
    status, output = run(project, "crawl", "docs", "-a", f"url={other_site.url}")
    assert status == 0, output
    assert len(other_site.hits) == 30
    assert f"Crawl finished: {pages(output)} pages" in output


def test_the_shell_keeps_away_from_a_paused_job(project: Path, other_site: Site) -> None:
    other_site.hold_after(1)
    process = scrapy(project, "crawl", "docs", "-a", f"url={other_site.url}", "-s", "JOBDIR=job")
    end = time.monotonic() + LIMIT
    while not other_site.is_holding() and time.monotonic() < end:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    other_site.release()
    process.communicate(timeout=LIMIT)

    def contents() -> dict[str, bytes]:
        files = (path for path in (project / "job").rglob("*") if path.is_file())
        return {os.fspath(path): path.read_bytes() for path in files if path.name != "lock"}

    before = contents()
    ask = ("shell", other_site.url, "-c", "response.status")
    process = scrapy(project, *ask, "-s", "JOBDIR=job")
    assert process.stdout
    limit = threading.Timer(LIMIT, process.kill)
    limit.start()
    assert any("start it with -s JOBDIR=" in line for line in process.stdout)
    limit.cancel()
    process.kill()  # since Scrapy 2.14 it ends by itself; before, it hangs
    process.communicate(timeout=LIMIT)
    assert contents() == before
    status, output = run(project, *ask, "-s", "JOBDIR=", "-s", "BLOOM_DIR=kept")
    assert status == 0
    assert output.splitlines()[-1] == "200"
    assert not (project / "kept").exists()


def test_fetch_works(project: Path, other_site: Site) -> None:
    status, output = run(project, "fetch", "--nolog", f"{other_site.url}p/3")
    assert status == 0
    assert "<a href=" in output
