"""The branches for Windows and macOS, run on Linux in a process without what those systems lack."""

import errno
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from scrapy_bloom.commands import is_broken_pipe
from scrapy_bloom.job.locks import holders
from tests.support.crawls import ROOT, Crawl, run_script, spider_with
from tests.support.sites import LIMIT, Site

PAGES = {f"/p/{number}" for number in range(150)}
PRETENDS = f"""
import sys
sys.path.append({os.fspath(ROOT)!r})
from tests.support import like_windows
like_windows.pretend()
"""

# Windows tells of a pipe that nobody reads as of an argument that is not valid.
CUT_OFF = """
    import errno, io, os
    from scrapy.cmdline import execute

    class CutOff(io.TextIOWrapper):
        def write(self, text):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    sys.stdout = CutOff(sys.stdout.buffer)
    execute(["scrapy", "bloom", "plan"])
"""


def test_a_crawl_without_what_windows_lacks_survives_a_kill_and_a_pause(
    tree: Site, tmp_path: Path
) -> None:
    """The filter grows meanwhile, and no open file is renamed or removed."""
    settings = {
        "SCHEDULER": "scrapy_bloom.CrashSafeScheduler",
        "JOBDIR": "job",
        "BLOOM_EXPECTED_REQUESTS": 20,
        "BLOOM_SYNC_SECS": 0.05,
    }
    spider = spider_with(tmp_path, PRETENDS)
    Crawl.held(tree, 40, tmp_path, settings, spider=spider).kill()
    paused = Crawl.held(tree, 40, tmp_path, settings, spider=spider)
    assert paused.interrupt() == 0
    resumed = Crawl(tree.url, tmp_path, settings, spider=spider)
    assert resumed.finish() == 0
    for crawl in (paused, resumed):
        assert not [*crawl.lines("ERROR"), *crawl.lines("WARNING")], crawl.output
        assert "Traceback" not in crawl.output
    assert set(tree.hits) == PAGES
    left = {path.name for path in (tmp_path / "job/bloom").iterdir()} - {"lock", "logs.json"}
    assert left == {f"generation-{number:04d}.bloom" for number in range(1, len(left) + 1)}


def test_a_killed_job_under_scrapys_scheduler_starts_over(tree: Site, tmp_path: Path) -> None:
    spider = spider_with(tmp_path, PRETENDS)
    Crawl.held(tree, 40, tmp_path, {"JOBDIR": "job"}, spider=spider).kill()
    again = Crawl(tree.url, tmp_path, {"JOBDIR": "job"}, spider=spider)
    assert again.finish() == 0
    assert "Traceback" not in again.output
    assert not again.lines("ERROR")
    assert len(list((tmp_path / "job").rglob("*.set-aside-*"))) >= 2  # queue and filter
    assert set(tree.hits) == PAGES


def run(script: str, directory: Path) -> None:
    """Run a script in a process without what Windows lacks."""
    ended = run_script(PRETENDS + textwrap.dedent(script), cwd=directory)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "Traceback" not in ended.stderr


def test_files_of_a_window_are_removed_once_they_are_closed(tmp_path: Path) -> None:
    run(
        """
        from pathlib import Path
        from tests.support.clock import Clock
        from tests.support.local_filters import WINDOW, files, fps, make

        filters, clock = Path("bloom"), Clock()
        for is_crawl, sync_secs in ((False, 0), (True, 0), (True, 3600)):
            options = {"window_secs": WINDOW, "is_crawl": is_crawl, "sync_secs": sync_secs}
            backend = make(filters, clock, **options)
            backend.begin()
            assert backend.add_many(fps(9)) == 9
            first = files(filters)
            for number in range(12):
                clock.now += WINDOW / 4
                backend.add_many(fps(9, 9 + number))
            clock.now += 2 * WINDOW
            backend.add(b"one more")
            backend.close()
            assert len(files(filters)) == 1, files(filters)
            assert files(filters) != first[-1:]
            clock.now += 2 * WINDOW
        """,
        tmp_path,
    )


def test_the_commands_run_and_leave_nothing(tmp_path: Path) -> None:
    (tmp_path / "urls.txt").write_text("".join(f"http://a.b/{n}\n" for n in range(9000)))
    run(
        """
        from contextlib import suppress
        from dataclasses import replace
        from pathlib import Path
        from scrapy.cmdline import execute
        from tests.support.local_filters import files
        from scrapy_bloom.copying.merging import new_filter
        from scrapy_bloom.files.file import FilterFile
        from scrapy_bloom.files.directory import found_files

        def bloom(*arguments, status=0):
            try:
                execute(["scrapy", "bloom", *arguments])
            except SystemExit as end:
                assert (end.code or 0) == status, (arguments, end.code)

        made_by = ("-s", "BLOOM_EXPECTED_REQUESTS=1000", "-s", "BLOOM_SALT=" + "00" * 16)
        bloom("import", "urls.txt", "a", *made_by)
        bloom("import", "urls.txt", "b", *made_by)
        bloom("check", "a", "urls.txt")
        bloom("forget", "a", "http://a.b/1")
        bloom("info", "a", "--json")
        bloom("merge", "a", "b", "-o", "c")
        bloom("merge", "a", "b", "-o", "c", status=1)  # there is a filter already
        bloom("reset", "a", "--yes")
        assert files(Path("a")) == [], files(Path("a"))

        Path("d").mkdir()
        with suppress(KeyError), new_filter(Path("d")) as made:
            first, *_ = found_files(Path("c"))
            made.append(FilterFile.create(replace(first, path=Path("d/generation-0001.bloom"))))
            raise KeyError
        assert files(Path("d")) == [], files(Path("d"))
        """,
        tmp_path,
    )


def test_a_command_whose_output_nobody_reads_ends_in_silence(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PRETENDS + textwrap.dedent(CUT_OFF)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (1, "")


@pytest.mark.usefixtures("windows")
def test_an_invalid_file_name_is_no_broken_pipe() -> None:
    told = OSError(errno.EINVAL, os.strerror(errno.EINVAL), "report?.html")
    cut_off = OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    assert [is_broken_pipe(each) for each in (told, cut_off)] == [False, True]


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")


@pytest.mark.usefixtures("windows")
def test_lock_holders_are_unknown_where_the_system_lists_none(tmp_path: Path) -> None:
    assert holders(tmp_path / "lock") is None
