"""Disks that fill up or lose files in mid-crawl: no page is lost, and one line tells what to do."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from scrapy_bloom.files.file import FileGeneration
from tests.support.cli import bloom
from tests.support.crawls import Crawl
from tests.support.machine import REQUIRED
from tests.support.sites import Site

PAGES = 150
FILTER = "kept/generation-0001.bloom"
SAFE = {"SCHEDULER": "scrapy_bloom.CrashSafeScheduler", "JOBDIR": "kept"}

_MOUNT = 'mount -t tmpfs -o size="$1" none "$2" && echo mounted && read -r _'


class SmallDisk:
    """A tmpfs of its own at `path`, in a mount namespace of its own: it ends with this process.

    Root may mount; elsewhere a user namespace lets anybody do so.

    Args:
        path: a directory; other processes see it empty.
        size: of the disk, in bytes.

    Attributes:
        inside: the path by which this process sees what is on the disk.
        prefix: begins a command that shall see the disk at `path`.
    """

    def __init__(self, path: Path, size: int) -> None:
        path.mkdir(parents=True)
        flags = ["--mount"] if os.geteuid() == 0 else ["--mount", "--user", "--map-root-user"]
        self._holder = subprocess.Popen(
            ["unshare", *flags, "sh", "-c", _MOUNT, "sh", str(size), os.fspath(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._holder.stdout is not None
        self.is_there = self._holder.stdout.readline() == b"mounted\n"
        user = ["--user", "--preserve-credentials"] if os.geteuid() else []
        self.prefix = [
            *("nsenter", "--target", str(self._holder.pid), "--mount", *user),
            *("sh", "-c", 'cd "$0" && exec "$@"', os.fspath(path.parent)),
        ]
        self.inside = Path(f"/proc/{self._holder.pid}/root{path}")

    def end(self) -> None:
        """Unmount it, once no crawl runs there any more."""
        self._holder.communicate()
        self._holder.wait(10)

    def fill(self) -> None:
        """Use up all room that is left."""
        with (self.inside / "filler").open("wb", buffering=0) as file:
            for size in (1 << 16, 1 << 10, 1):
                try:
                    while file.write(b"x" * size):
                        pass
                except OSError:
                    continue

    def free(self) -> None:
        """Make room again."""
        (self.inside / "filler").unlink()


def can_be_made(path: Path) -> bool:
    """Whether this machine lets us mount; some containers do not."""
    try:
        disk = SmallDisk(path, 1 << 20)
    except OSError:
        return False
    disk.end()
    return disk.is_there


with tempfile.TemporaryDirectory() as _directory:
    CAN_MOUNT = can_be_made(Path(_directory, "disk"))
if not CAN_MOUNT and "small-disk" in REQUIRED:
    raise RuntimeError("no tmpfs can be mounted, neither as root nor in a user namespace")
needs_a_mount = pytest.mark.skipif(
    not CAN_MOUNT, reason="no tmpfs can be mounted here: test_crawl.py has a full disk by a limit"
)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    disk = SmallDisk(tmp_path / "kept", 16 << 20)
    assert disk.is_there
    yield disk
    disk.end()


def all_pages(site: Site) -> bool:
    return set(site.hits) == {f"/p/{number}" for number in range(PAGES)}


@needs_a_mount
def test_a_disk_that_fills_up_in_mid_crawl_costs_no_page(
    disk: SmallDisk, tree: Site, tmp_path: Path
) -> None:
    """One error with what is missing; what was reserved goes on; later the filter grows again."""
    settings = {"BLOOM_DIR": "kept", "BLOOM_EXPECTED_REQUESTS": 30, "CONCURRENT_REQUESTS": 4}
    crawl = Crawl.held(tree, 5, tmp_path, settings, prefix=disk.prefix)
    disk.fill()
    tree.release()
    assert crawl.finish() == 0, crawl.output
    assert all_pages(tree)
    (error,) = crawl.lines("ERROR")
    assert "No room for a new generation" in error
    assert "No space left on device" in error
    assert "make room" in error
    assert "'finish_reason': 'finished'" in crawl.output
    assert [path.name for path in disk.inside.glob("*.bloom*")] == ["generation-0001.bloom"]
    assert not FileGeneration.at(disk.inside / "generation-0001.bloom").in_use
    # With room again, the next run grows, and knows all.
    disk.free()
    tree.forget()
    settings = {**settings, "BLOOM_EXPECTED_REQUESTS": 1000}
    crawl = Crawl(tree.url, tmp_path, settings, prefix=disk.prefix)
    assert crawl.finish() == 0
    assert set(tree.hits) == {"/p/0"}
    assert not crawl.lines("ERROR")


@needs_a_mount
def test_a_queue_on_a_disk_that_fills_up_goes_on_when_there_is_room(
    disk: SmallDisk, tree: Site, tmp_path: Path
) -> None:
    """The spider is closed, one error says what to do, and the same command ends the job."""
    settings = {**SAFE, "BLOOM_EXPECTED_REQUESTS": 1000}
    crawl = Crawl.held(tree, 5, tmp_path, settings, prefix=disk.prefix)
    disk.fill()
    tree.release()
    assert crawl.finish() == 0, crawl.output
    assert "'finish_reason': 'bloom_queue_failed'" in crawl.output
    (error,) = crawl.told("ERROR")
    assert f"The queue in {tmp_path}/kept/requests.sqlite, or its filter, cannot be" in error
    assert "make room, or repair the disk, and start the crawl again" in error
    assert len(tree.hits) < PAGES
    disk.free()
    crawl = Crawl(tree.url, tmp_path, settings, prefix=disk.prefix)
    assert crawl.finish() == 0, crawl.output
    assert "'finish_reason': 'finished'" in crawl.output
    assert not crawl.told("ERROR")  # Scrapy's own spider.state may have found no room
    assert all_pages(tree)


@needs_a_mount
def test_a_full_disk_ends_no_process_by_a_signal(disk: SmallDisk, tmp_path: Path) -> None:
    """Every bit of a filter has its place before the first one is set: else SIGBUS ends it."""
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from scrapy_bloom.files.backend import LocalBackend\n"
        "from scrapy_bloom.generations.policy import Policy\n"
        "policy = Policy(expected=20_000, error_rate=1e-6, on_full='warn')\n"
        "backend = LocalBackend(Path('kept'), policy)\n"
        "backend.open()\n"
        "print('opened', flush=True)\n"
        "sys.stdin.readline()\n"
        "for number in range(20_000):\n"
        "    assert backend.add(number.to_bytes(20, 'big'))\n"
        "backend.close()\n"
        "print('closed')\n"
    )
    process = subprocess.Popen(
        [*disk.prefix, sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "opened\n"
    disk.fill()
    output, _ = process.communicate("go on\n", timeout=60)
    assert (process.returncode, output) == (0, "closed\n")
    assert FileGeneration.at(disk.inside / "generation-0001.bloom").count == 20_000


def start(tree: Site, tmp_path: Path, **settings: object) -> Crawl:
    """A crawl that has only just begun."""
    settings = {"BLOOM_DIR": "kept", "BLOOM_EXPECTED_REQUESTS": 40, **settings}
    prefix = settings.pop("prefix", ())
    return Crawl.held(tree, 2, tmp_path, {**settings, "CONCURRENT_REQUESTS": 2}, prefix=prefix)


def test_a_directory_removed_under_a_crawl_costs_no_page(tree: Site, tmp_path: Path) -> None:
    """The open file is still filtered with; that it can't grow, and that it is gone, are told."""
    crawl = start(tree, tmp_path)
    shutil.rmtree(tmp_path / "kept")
    tree.release()
    assert crawl.finish() == 0, crawl.output
    assert all_pages(tree)
    assert all(count == 1 for path, count in tree.hits.items() if path != "/p/0")
    no_room, gone = crawl.lines("ERROR")
    assert "No room for a new generation" in no_room
    assert "kept/generation-0002.bloom cannot be created: No such file or directory" in no_room
    assert "kept/generation-0001.bloom was removed, or replaced by another file" in gone
    # The next run begins with an empty filter, and crawls all of it again.
    tree.forget()
    assert Crawl(tree.url, tmp_path, {"BLOOM_DIR": "kept"}).finish() == 0
    assert all_pages(tree)


def test_a_directory_made_read_only_under_a_crawl_costs_no_page(tree: Site, tmp_path: Path) -> None:
    """What is open is written to; that there can be no further file is one error."""
    root = ["setpriv", "--bounding-set", "-dac_override"] if os.geteuid() == 0 else []
    crawl = start(tree, tmp_path, prefix=root)
    (tmp_path / FILTER).chmod(0o444)
    (tmp_path / "kept").chmod(0o555)
    tree.release()
    assert crawl.finish() == 0, crawl.output
    (tmp_path / "kept").chmod(0o755)
    assert all_pages(tree)
    (error,) = crawl.lines("ERROR")
    assert "kept/generation-0002.bloom cannot be created: Permission denied" in error
    found = FileGeneration.at(tmp_path / FILTER)
    assert not found.in_use
    assert found.count >= found.capacity


@pytest.mark.parametrize("length", [0, 4096])
def test_a_file_cut_off_under_a_crawl_is_told_of_by_the_next_run(
    length: int, tree: Site, tmp_path: Path
) -> None:
    """The kernel ends a process that writes to a mapping without a file: it can't tell why.

    The next run does: nothing is taken for a smaller or emptier filter.
    """
    crawl = start(tree, tmp_path)
    os.truncate(tmp_path / FILTER, length)
    tree.release()
    assert crawl.finish() == -signal.SIGBUS, crawl.output
    before = (tmp_path / FILTER).read_bytes()
    tree.forget()
    crawl = Crawl(tree.url, tmp_path, {"BLOOM_DIR": "kept"})
    assert crawl.finish() != 0
    assert not tree.hits
    (error,) = crawl.told("ERROR")
    assert re.search(FILTER + " (is cut off|has 4,096 bytes where its header)", error)
    assert "move it away" in error
    assert (tmp_path / FILTER).read_bytes() == before


def test_a_file_replaced_under_a_crawl_is_not_overwritten(tree: Site, tmp_path: Path) -> None:
    """A restored backup, for example: the crawl goes on with the file that it has opened."""
    crawl = start(tree, tmp_path, BLOOM_EXPECTED_REQUESTS=1000)
    other = tmp_path / "other"
    other.write_bytes(b"a backup")
    other.rename(tmp_path / FILTER)
    tree.release()
    assert crawl.finish() == 0, crawl.output
    assert all_pages(tree)
    (error,) = crawl.lines("ERROR")
    assert "kept/generation-0001.bloom was removed, or replaced by another file" in error
    assert "is lost to the next run, which crawls it again" in error
    assert (tmp_path / FILTER).read_bytes() == b"a backup"


@needs_a_mount
@pytest.mark.parametrize("pages", [0, 1, 3])
def test_to_forget_on_a_full_disk_harms_nothing(
    pages: int, disk: SmallDisk, tmp_path: Path
) -> None:
    """With that many pages left: SQLite needs several for its file, its log and the index of it."""
    (tmp_path / "urls.txt").write_text("https://shop.example/1\nhttps://shop.example/2\n")
    run = partial(bloom, cwd=tmp_path, under=disk.prefix)
    check = ("check", "kept/f", "urls.txt", "--json")
    assert run("import", "urls.txt", "kept/f", "-n", "1k").status == 0
    disk.fill()
    with (disk.inside / "filler").open("r+b") as file:
        file.truncate(max(file.seek(0, os.SEEK_END) - 4096 * pages, 0))
    ran = run("forget", "kept/f", "https://shop.example/1")
    assert "of the forgotten requests cannot be used" in ran.error
    disk.free()
    assert run(*check).json["seen"] == 2
    assert run("import", "urls.txt", "kept/f").status == 0
    assert run("forget", "kept/f", "https://shop.example/1").status == 0
    assert run(*check).json["seen"] == 1
