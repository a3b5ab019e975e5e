"""Where a filter is, or a list: a path or the URL of a server, and what is neither is refused."""

from pathlib import Path

import pytest

from crawls import Crawl
from sites import Site

SECRET = "hushhush"


@pytest.mark.parametrize("place", ["file", "file/inner"])
def test_a_bloom_dir_that_is_a_file(place: str, tree: Site, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    crawl = Crawl(tree.url, tmp_path, {"BLOOM_DIR": place})
    assert crawl.finish() != 0
    (line,) = crawl.told("ERROR")
    assert f"file is a file, and {tmp_path / place} has to be a directory" in line
    assert "another JOBDIR or BLOOM_DIR" in line
    assert (tmp_path / "file").read_text() == "mine"
    assert not tree.hits


def test_a_bloom_dir_that_is_a_url(tree: Site, tmp_path: Path) -> None:
    """A directory would bear the password in its name."""
    crawl = Crawl(tree.url, tmp_path, {"BLOOM_DIR": f"redis://:{SECRET}@localhost/0"})
    assert crawl.finish() != 0
    (line,) = crawl.told("ERROR")
    assert "BLOOM_DIR is a URL" in line
    assert "BLOOM_REDIS_URL" in line
    assert SECRET not in crawl.output
    assert [each.suffix for each in tmp_path.iterdir()] == [".log"]
