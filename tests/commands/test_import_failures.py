"""What an import says when the disk fails under it."""

from pathlib import Path

import pytest

from tests.support.cli import bloom
from tests.support.crawls import with_modules
from tests.support.workspace import fingerprints, make_filter, urls, write_urls

# The disk of such a process fails while there is a file of that name.
FAILING = """
import errno, os
fsync = os.fsync
def fails(fd):
    if not os.path.exists("fails"):
        return fsync(fd)
    raise OSError(errno.EIO, os.strerror(errno.EIO))
os.fsync = fails
"""


@pytest.mark.parametrize("sync_secs", ["0.01", "0"], ids=["meanwhile", "in the end"])
def test_a_disk_that_fails(sync_secs: str, tmp_path: Path) -> None:
    """It is no full filter, and no crawl goes on; the command can be repeated."""
    make_filter(tmp_path / "filter", fingerprints(urls(range(3))), capacity=100_000)
    write_urls(tmp_path / "urls.txt", urls(range(60_000)))
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules/sitecustomize.py").write_text(FAILING)
    (tmp_path / "fails").touch()
    command = ("import", "urls.txt", "filter", "-s", f"BLOOM_SYNC_SECS={sync_secs}")
    failing = ["env", f"PYTHONPATH={with_modules(tmp_path / 'modules')['PYTHONPATH']}"]
    ran = bloom(*command, cwd=tmp_path, under=failing)
    assert "could not be written to the disk: Input/output error" in ran.error
    assert "requests are recorded; fix that, and repeat the command to continue" in ran.error
    assert "full" not in ran.err
    assert "crawl" not in ran.err
    assert ran.err.count("\n") == 1
    (tmp_path / "fails").unlink()
    ran = bloom(*command, "--json", cwd=tmp_path)
    assert (ran.status, ran.json["read"]) == (0, 60_000)
    assert 59_000 < ran.json["recorded"] <= 60_000  # as after a kill, a count may be a little low
