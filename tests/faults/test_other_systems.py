"""The branches for Windows and macOS, run on Linux in a process without what those systems lack."""

import errno
import os
import sys
from pathlib import Path

import pytest

from scrapy_bloom.commands import is_broken_pipe
from scrapy_bloom.job.jobdir import holders
from tests.support.crawls import ROOT, Crawl, run_script, spider_with
from tests.support.sites import Site

PAGES = 90
PRETENDS = f"""
import sys
sys.path.append({os.fspath(ROOT)!r})
from tests.support import like_windows
like_windows.pretend()
"""


def test_a_crawl_without_what_windows_lacks_survives_a_kill_and_a_pause(
    tree: Site, tmp_path: Path
) -> None:
    """The filter grows meanwhile, and no open file is renamed or removed."""
    settings = {
        "SCHEDULER": "scrapy_bloom.CrashSafeScheduler",
        "JOBDIR": "job",
        "BLOOM_EXPECTED_REQUESTS": 20,
    }
    often = "from scrapy_bloom.files import backend\nbackend.SYNC_SECS = 0.05\n"
    spider = spider_with(tmp_path, PRETENDS + often)
    Crawl.held(tree, 40, tmp_path, settings, spider=spider).kill()
    paused = Crawl.held(tree, 40, tmp_path, settings, spider=spider)
    assert paused.interrupt() == 0
    resumed = Crawl.finished(tree.url, tmp_path, settings, spider=spider)
    for crawl in (paused, resumed):
        assert not [*crawl.lines("ERROR"), *crawl.lines("WARNING")], crawl.output
        assert "Traceback" not in crawl.output
    assert len(tree.hits) == PAGES
    left = {path.name for path in (tmp_path / "job/bloom").iterdir()} - {
        "lock",
        "log.json",
        "sample.json",
    }
    assert left == {f"generation-{number:04d}.bloom" for number in range(1, len(left) + 1)}


COMMANDS = """
from pathlib import Path
from scrapy.cmdline import execute
from tests.support.local_filters import files

def bloom(*arguments, status=0):
    try:
        execute(["scrapy", "bloom", *arguments])
    except SystemExit as end:
        assert (end.code or 0) == status, (arguments, end.code)

bloom("import", "urls.txt", "a", "-s", "BLOOM_EXPECTED_REQUESTS=1000")
bloom("check", "a", "urls.txt")
bloom("info", "a", "--json")
bloom("copy", "a", "new/c")
bloom("copy", "a", "new/c", status=1)  # there is a filter already
bloom("copy", "new/c", "d")
bloom("reset", "a", "--yes")
assert files(Path("a")) == [], files(Path("a"))
"""


def test_the_commands_run_and_leave_nothing(tmp_path: Path) -> None:
    (tmp_path / "urls.txt").write_text("".join(f"http://a.b/{n}\n" for n in range(9000)))
    ended = run_script(PRETENDS + COMMANDS, cwd=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")


@pytest.mark.usefixtures("windows")
def test_an_invalid_file_name_is_no_broken_pipe() -> None:
    invalid_name = OSError(errno.EINVAL, os.strerror(errno.EINVAL), "report?.html")
    cut_off = OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    assert [is_broken_pipe(each) for each in (invalid_name, cut_off)] == [False, True]


@pytest.mark.usefixtures("windows")
def test_lock_holders_are_unknown_where_the_system_lists_none(tmp_path: Path) -> None:
    assert holders(tmp_path / "lock") is None
