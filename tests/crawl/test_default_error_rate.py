"""The default error rate, and filters that were made for a higher one."""

from pathlib import Path

from scrapy_bloom.files.directory import found_files
from tests.support.crawls import Crawl
from tests.support.sites import Site

PAGES = 60  # of the tree


def rates(job: Path) -> list[float]:
    return [each.error_rate for each in found_files(job)]


def test_one_in_a_billion(tree: Site, tmp_path: Path) -> None:
    crawl = Crawl.finished(tree.url, tmp_path, {"JOBDIR": "job"})
    assert rates(tmp_path / "job") == [5e-10]  # the other half is for the files that it grows by
    assert "1,000,000 requests at error rate 1e-09, 5.4 MiB; 0 already recorded" in crawl.output


def test_a_filter_of_another_rate_keeps_it(tree: Site, tmp_path: Path) -> None:
    settings = {"JOBDIR": "job", "BLOOM_EXPECTED_REQUESTS": 40}
    at_first = {**settings, "BLOOM_ERROR_RATE": "1e-6", "CLOSESPIDER_PAGECOUNT": 15}
    crawl = Crawl.finished(tree.url, tmp_path, at_first)
    files = len(rates(tmp_path / "job"))
    crawl = Crawl.finished(tree.url, tmp_path, settings)
    assert len(tree.hits) == PAGES
    (line,) = [line for line in crawl.told("INFO") if "keeps the error rate" in line]
    kept = sum(rates(tmp_path / "job")[:files])
    assert f"that its files were made for, {kept:.2g}; BLOOM_ERROR_RATE = 1e-09 is for" in line
    assert not [line for line in crawl.told("WARNING") if "error rate" in line]
    assert all(each <= 1e-9 for each in rates(tmp_path / "job")[files:])
