"""CrashSafeScheduler after a power cut: the disk is as it was at some instant before."""

import os
import re
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from crawls import Crawl
from disks import Disk
from machine import REQUIRED
from scrapy_bloom.job.paths import BOOT_ID, IN_USE
from sites import Site
from workspace import in_redis

PAGES = 150
SAFE = {"SCHEDULER": "scrapy_bloom.CrashSafeScheduler", "JOBDIR": "job"}
NO_SYNC = {**SAFE, "BLOOM_SYNC_SECS": 3600}  # the kernel may write what it likes meanwhile

pytestmark = pytest.mark.skipif(not BOOT_ID.exists(), reason="no boot id: a cut looks like a kill")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    try:
        disk = Disk(tmp_path / "power")
    except OSError as error:
        if "small-disk" in REQUIRED:
            raise
        pytest.skip(f"no disk can be mounted: {error}")
    yield disk
    disk.end()


def restart_machine(job: Path) -> None:
    """Change the boot that the job's note names: to the crawl, that is another start."""
    boot = BOOT_ID.read_text().strip()
    mark = job / IN_USE
    assert boot in mark.read_text()
    mark.write_text(mark.read_text().replace(boot, "01234567-89ab-cdef-0123-456789abcdef"))


def told_times(line: str) -> list[float]:
    stamps = re.findall(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", line.partition("WARNING")[2])
    return [time.mktime(time.strptime(stamp, "%Y-%m-%d %H:%M:%S")) for stamp in stamps]


def test_a_filter_that_is_newer_than_its_queue(tree: Site, tmp_path: Path) -> None:
    """The kernel wrote the mapped filter to the disk, and not yet what was queued meanwhile."""
    job, begun = tmp_path / "job", time.time()
    crawl = Crawl.held(tree, 10, tmp_path, NO_SYNC)
    crawl.stop()
    stopped = time.time()
    shutil.copytree(job, tmp_path / "as it was")
    crawl.send(signal.SIGCONT)
    tree.hold_after(40)
    crawl.wait_until(lambda: tree.total() >= 50 and tree.is_holding())
    crawl.kill()
    for part in ("", "-wal"):
        shutil.copy2(tmp_path / f"as it was/requests.sqlite{part}", job)
    (job / "requests.sqlite-shm").unlink()
    restart_machine(job)
    crawl = Crawl(tree.url, tmp_path, NO_SYNC)
    assert crawl.finish() == 0
    (line,) = crawl.told("WARNING")
    assert "the machine went down" in line
    assert "no page is lost" in line
    assert "another JOBDIR" in line
    (queue_of,) = told_times(line)
    assert begun - 1 < queue_of <= stopped  # it is told in whole seconds
    assert len(tree.hits) == PAGES
    assert not list(job.glob("bloom/journal*"))


@pytest.mark.parametrize("capacity", [10_000, 40], ids=["one file", "growing"])
def test_a_cut_of_a_real_disk(capacity: int, disk: Disk, tree: Site, tmp_path: Path) -> None:
    settings = {
        **NO_SYNC,
        "JOBDIR": str(disk.path / "job"),
        "BLOOM_SYNC_SECS": 1 if capacity == 40 else 3600,
        "BLOOM_EXPECTED_REQUESTS": capacity,
    }
    crawl = Crawl.held(tree, 50, tmp_path, settings)
    crawl.stop()
    for path in (disk.path / "job/bloom").glob("generation-*.bloom"):
        with path.open("rb") as file:  # as the kernel may do at any time
            os.fsync(file.fileno())
    disk.cut()
    crawl.kill()
    disk.restart()
    restart_machine(disk.path / "job")
    crawl = Crawl(tree.url, tmp_path, settings)
    assert crawl.finish() == 0
    assert len(crawl.told("WARNING")) == 1, crawl.output
    assert len(tree.hits) == PAGES


@pytest.mark.parametrize(
    ("settings", "fate"),
    [
        ({"JOBDIR": "{}/job"}, "The crawl starts over with an empty filter"),
        ({"BLOOM_DIR": "{}/kept"}, "look seen and are not crawled"),
        ({"BLOOM_DIR": "{}/kept", "BLOOM_RECORD_ON": "crawled"}, "What it had crawled is kept"),
    ],
    ids=["a job", "a filter alone", "a filter of what was crawled"],
)
def test_a_cut_with_scrapys_scheduler(
    settings: dict[str, str], fate: str, disk: Disk, tree: Site, tmp_path: Path
) -> None:
    settings = {name: value.format(disk.path) for name, value in settings.items()}
    crawl = Crawl.held(tree, 50, tmp_path, settings)
    crawl.stop()
    os.sync()  # the filter is there, and as new as it can be
    disk.cut()
    crawl.kill()
    disk.restart()
    starts_over = "JOBDIR" in settings
    if starts_over:
        tree.forget()
    crawl = Crawl(tree.url, tmp_path, settings)
    assert crawl.finish() == 0, crawl.output
    (line,) = crawl.told("WARNING")
    assert fate in line
    assert (len(tree.hits) == PAGES) == starts_over


@pytest.mark.parametrize("backend", ["files", "redis"])
def test_a_cut_after_a_pause_with_scrapys_scheduler(
    backend: str, disk: Disk, tree: Site, tmp_path: Path
) -> None:
    """What says that the job is closed reaches the disk, and nothing that was not synced."""
    settings: dict[str, object] = {
        "JOBDIR": str(disk.path / "job"),
        # Scrapy writes it when the job is closed already, and fails to read it.
        "EXTENSIONS": '{"scrapy.extensions.spiderstate.SpiderState": null}',
    }
    if backend == "redis":
        settings |= in_redis(tmp_path.name)
    crawl = Crawl.held(tree, 50, tmp_path, settings)
    assert crawl.interrupt() == 0, crawl.output
    fd = os.open(disk.path / "job", os.O_RDONLY)  # as the kernel does it after some seconds
    os.fsync(fd)
    os.close(fd)
    disk.cut()
    disk.restart()
    crawl = Crawl(tree.url, tmp_path, settings)
    assert crawl.finish() == 0, crawl.output
    assert "Traceback" not in crawl.output
    assert not crawl.told("WARNING") + crawl.told("ERROR")
    assert len(tree.hits) == PAGES


def test_a_filter_in_redis_may_be_newer(tree: Site, tmp_path: Path) -> None:
    settings = in_redis(tmp_path.name, **SAFE)
    crawl = Crawl.held(tree, 50, tmp_path, settings)
    crawl.kill()
    assert "or end early, run the same command again" in crawl.told("INFO")[-1]
    restart_machine(tmp_path / "job")
    crawl = Crawl(tree.url, tmp_path, settings)
    assert crawl.finish() == 0
    (line,) = crawl.told("WARNING")
    assert len(told_times(line)) == 1
    assert "may look seen and be nowhere" in line
    assert "another JOBDIR" in line
    assert len(tree.hits) == PAGES  # since it was only a kill


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is missing")
def test_the_queue_is_written_to_the_disk_before_the_filter(tree: Site, tmp_path: Path) -> None:
    """Seen from outside, at each regular write and at the end."""
    trace = tmp_path / "trace"
    strace = ("strace", "-f", "-y", "-qq", "-e", "trace=fsync,fdatasync", "-o", os.fspath(trace))
    tree.delay = 0.05
    settings = {**SAFE, "BLOOM_SYNC_SECS": 0.3, "CONCURRENT_REQUESTS": 4}  # it takes 2 seconds
    crawl = Crawl(tree.url, tmp_path, settings, prefix=strace)
    assert crawl.finish() == 0
    # Also of a call that another thread's comes in between.
    synced = re.findall(r"sync\(\d+<[^>]*/([^/>]+)>", trace.read_text())
    writes = [at for at, name in enumerate(synced) if name == "generation-0001.bloom"]
    regular = [at for at in writes if synced[at - 1] == "requests.sqlite-wal"]
    assert len(regular) >= 2
    # Besides: two at the end, after the queue was closed, and one when the file was made.
    assert len(writes) - len(regular) <= 3
    last_of_queue = max(at for at, name in enumerate(synced) if name.startswith("requests.sqlite"))
    assert last_of_queue < writes[-2]
