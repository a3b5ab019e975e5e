"""Whatever a spider's name is, the filter stays in the directory that BLOOM_DIR says."""

from pathlib import Path

import pytest

from tests.support.crawls import Crawl, spider_with
from tests.support.sites import Site, tree_site


def crawl(name: str, bloom_dir: str, directory: Path) -> Crawl:
    site: Site = tree_site(pages=3)
    spider = spider_with(directory, f"LinkSpider.name = {name!r}\n")
    crawl = Crawl(site.url, directory / "work", {"BLOOM_DIR": bloom_dir}, spider=spider)
    assert crawl.finish() == 0, crawl.output
    assert len(site.hits) == 3
    site.end()
    return crawl


def test_a_name_is_one_part_of_the_path(tmp_path: Path) -> None:
    crawl("../x", "base/%(spider)s", tmp_path)
    there = {each.name for each in tmp_path.iterdir()} - {"__pycache__"}
    assert there == {"spider.py", "work"}
    assert list((tmp_path / "work/base/..%2Fx").glob("generation-*.bloom"))


@pytest.mark.parametrize("name", ["~root", "/etc/x"])
def test_a_name_at_the_beginning(name: str, tmp_path: Path) -> None:
    """It names no home directory, and none of the system."""
    crawl(name, "%(spider)s", tmp_path)
    assert list((tmp_path / "work").glob("*/generation-*.bloom"))


def test_a_directory_whose_name_begins_with_a_tilde(tmp_path: Path) -> None:
    """As the error says that names no home directory."""
    crawl("shop", "./~nobody-of-that-name", tmp_path)
    assert list((tmp_path / "work/~nobody-of-that-name").glob("generation-*.bloom"))
