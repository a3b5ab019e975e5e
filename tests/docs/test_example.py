"""The example project, run as its reader runs it."""

import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path

import pytest

from example import site
from scrapy_bloom.filters.sizing import choose_geometry
from scrapy_bloom.job.reader import FilterReader, has_filter
from tests.support.crawls import LIMIT
from tests.support.documents import BLOCK
from tests.support.processes import Scrapy, start_scrapy
from tests.support.servers import free_port, wait_for
from tests.support.shell import run_in_shell

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "example_project"
SMALL = {"SECTIONS": 2, "ARTICLES": 60}  # .ci/run crawls all of it


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of it, with a site of 200 pages."""
    copy = tmp_path / "example_project"
    shutil.copytree(EXAMPLE, copy, ignore=shutil.ignore_patterns("job*"))
    source = copy / "example/site.py"
    text = source.read_text()
    for name, number in SMALL.items():
        text, changed = re.subn(rf"^{name} = \d+", f"{name} = {number}", text, flags=re.MULTILINE)
        assert changed == 1
    source.write_text(text)
    return copy


def page_count(project: Path) -> int:
    return int(runpy.run_path(os.fspath(project / "example/site.py"))["page_count"]())


def start(project: Path, *args: str, env: Mapping[str, str] = os.environ) -> tuple[Scrapy, Path]:
    """Start Scrapy there; the process, and where it writes."""
    log = project / f"{args[0]}-{len(list(project.glob('*.log')))}.log"
    with log.open("wb") as file:
        return start_scrapy(args, cwd=project, out=file, err=file, env=env), log


def run(project: Path, *args: str) -> tuple[int, str]:
    return finish(*start(project, *args))


def finish(process: Scrapy, log: Path) -> tuple[int, str]:
    status = process.wait(LIMIT)
    if status is None:
        process.kill()
        raise AssertionError(log.read_text())
    return status, log.read_text()


def figure(output: str, name: str) -> float:
    found = re.search(rf"^  {re.escape(name)} +([\d,.e-]+)", output, re.MULTILINE)
    assert found, output
    return float(found[1].replace(",", ""))


def pages(output: str) -> int:
    found = re.search(r"^Crawl \w+: ([\d,]+) pages in this session", output, re.MULTILINE)
    assert found, output
    return int(found[1].replace(",", ""))


def recorded_in(file: Path) -> int:
    if not has_filter(file):
        return 0
    with closing(FilterReader(file)) as reader:
        return sum(generation.count for generation in reader.generations)


def test_the_site_has_what_real_sites_have() -> None:
    statuses = [site.status_of(number) for number in range(site.SECTIONS * site.ARTICLES)]
    assert 2000 < site.page_count() < 5000
    assert statuses.count(404) > 10
    assert statuses.count(500) > 10


def test_a_crawl_paused_with_ctrl_c_goes_on_with_the_same_command(project: Path) -> None:
    command = ("crawl", "docs", "-s", "JOBDIR=job")
    # At first so slow that it cannot be done before it is interrupted.
    process, log = start(project, *command, "-s", "DOWNLOAD_DELAY=0.2")
    file = project / "job/bloom.sqlite"
    wait_for(lambda: recorded_in(file) > 30, log.read_text)
    os.kill(process.pid, signal.SIGINT)
    status, first = finish(process, log)
    assert status == 0, first
    assert "Crawl paused:" in first
    assert "To resume it, run the same command." in first
    status, second = run(project, *command)
    assert status == 0, second
    assert "Crawl finished:" in second
    number = page_count(project)
    assert 0 < pages(first) < number
    assert pages(first) + pages(second) == number
    assert figure(first, "duplicates filtered") + figure(second, "duplicates filtered") > 1000
    recorded = figure(second, "requests recorded")
    assert number < recorded < 500
    assert figure(second, "Scrapy's own filter") == recorded * 91
    assert figure(second, "Bloom filter") == choose_geometry(5000, 5e-10).nbytes
    assert 0 < figure(second, "false-positive rate") < 1e-6
    assert 0 < figure(second, "false positives") < 1e-2


# No article is shown before both workers have joined the crawl.
FOR_BOTH = """
import time
from pathlib import Path

def _when_both_have_joined(self, answer=_Handler.do_GET):
    while self.path.startswith("/a/") and not Path("both").exists():
        time.sleep(0.01)
    answer(self)

_Handler.do_GET = _when_both_have_joined
"""
TERMINALS = re.compile(r"^\| \d \| `(python.+|scrapy crawl .+)` \|$", re.MULTILINE)


@pytest.fixture
def workers(project: Path) -> Iterator[list[tuple[Scrapy, Path]]]:
    """The commands of the page, run as they are: the first serves, the others crawl."""
    with (project / "example/site.py").open("a") as source:
        source.write(FOR_BOTH)
    first, *others = TERMINALS.findall((ROOT / "docs/distributed.md").read_text())
    known = {**os.environ, "EXAMPLE_PORT": str(free_port())}  # others may run it here now
    python, *arguments = first.split()
    assert python == "python"
    server = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=project,
        env=known,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    limit = threading.Timer(LIMIT, server.kill)
    limit.start()
    assert server.stdout
    assert "start workers" in server.stdout.readline()
    limit.cancel()
    started = [
        start(project, *other.removeprefix("scrapy ").split(), env=known) for other in others
    ]
    yield started
    for process, _ in started:
        process.kill()
    server.communicate("\n", timeout=LIMIT)
    assert server.returncode == 0


def test_two_workers_share_a_crawl(project: Path, workers: list[tuple[Scrapy, Path]]) -> None:
    assert len(workers) == 2
    for _, log in workers:
        wait_for(lambda log=log: "Bloom filter in " in log.read_text(), log.read_text)
    (project / "both").touch()
    outputs = [finish(*worker)[1] for worker in workers]
    assert all("Crawl finished:" in output for output in outputs), outputs
    assert all(pages(output) > 0 for output in outputs)
    assert sum(map(pages, outputs)) == page_count(project)
    assert sum("Spider closed (finished)" in output for output in outputs) == 2


def test_the_commands_of_getting_started(project: Path) -> None:
    text = (ROOT / "docs/getting-started.md").read_text()
    commands = "".join(code for language, code in BLOCK.findall(text) if language == "sh")
    ran = run_in_shell(commands, project)
    assert ran.returncode == 0, ran
    assert (project / "report.html").exists()
    shown = [
        line
        for page in ("docs/getting-started.md", "README.md")
        for language, code in BLOCK.findall((ROOT / page).read_text())
        if language == "text"
        for line in code.splitlines()
    ]
    assert len(shown) == 5
    for line in shown:
        if not line.startswith("Bloom filter: "):  # once a minute
            words = re.split(r"[\d,.e-]*\d|/\S*", line)
            pattern = ".+".join(map(re.escape, words))
            assert re.search(pattern, ran.stderr), line
