"""A fingerprinter that fails costs no page: the page is crawled, and one error says so."""

import re
from pathlib import Path

import pytest

from tests.support.crawls import Crawl
from tests.support.sites import ScriptedSite, Site

PAGES = 40

FINGERPRINTERS = """
import itertools

class Broken:
    "Each time something else that is no fingerprint."

    kinds = itertools.cycle([
        "text", None, 7, 1.5, True, [b"x"], (1, 2), object(), lambda: b"x", {1}, iter(b"x"),
        ValueError, RuntimeError, RecursionError, StopIteration, MemoryError,
    ])

    def fingerprint(self, request):
        kind = next(self.kinds)
        if isinstance(kind, type):
            raise kind("on purpose")
        return kind

class Text:
    "As before Scrapy 2.7."

    def fingerprint(self, request):
        return request.url

class Sometimes(Broken):
    "Fails for every third page only."

    def fingerprint(self, request):
        number = int(request.url.partition("?")[0].rpartition("/")[2] or 0)
        return super().fingerprint(request) if number % 3 == 1 else b"%d" % number
"""


def crawl_with(name: str, site: Site, path: Path, **settings: object) -> Crawl:
    (path / "fingerprinters.py").write_text(FINGERPRINTERS)
    settings = {
        "REQUEST_FINGERPRINTER_CLASS": f"fingerprinters.{name}",
        "JOBDIR": "job",
        "BLOOM_EXPECTED_REQUESTS": 15,
        **settings,
    }
    return Crawl(site.url, path, settings)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("Broken", {"SCHEDULER": "scrapy_bloom.CrashSafeScheduler"}),
        ("Sometimes", {}),
    ],
    ids=["always, in a crash-safe queue", "sometimes"],
)
def test_a_broken_fingerprinter_costs_no_page(
    name: str, settings: dict[str, object], tmp_path: Path
) -> None:
    """One error reports the first failure of a kind, a stat counts all, and the crawl finishes."""
    pages = [f"/p/{number}" for number in range(1, 31)]
    links = [f"{page}?{query}" for page in pages for query in ("a=1&b=2", "b=2&a=1")]
    site = ScriptedSite({"/": [tuple(links)]})
    crawl = crawl_with(name, site, tmp_path, **settings)
    assert crawl.finish() == 0, crawl.output[-3000:]
    site.end()
    assert "'finish_reason': 'finished'" in crawl.output
    # Crawled unfiltered, twice, where there is no fingerprint; the others are filtered as ever.
    failing = [page for page in pages if name == "Broken" or int(page[3:]) % 3 == 1]
    assert site.hits == {"/": 1, **{page: 1 + (page in failing) for page in pages}}
    errors = crawl.lines("ERROR")
    assert f"The Bloom filter failed on <GET {site.url}p/1?" in errors[0]
    text = "it is crawled, even if it is a duplicate. Further failures of this kind are not logged"
    assert all(text in error for error in errors)
    # No bytes, and five exceptions.
    assert len(errors) == crawl.output.count("Traceback") == 6
    counted = re.search(r"'bloom/errors': (\d+)", crawl.output)
    assert counted
    assert int(counted[1]) == 2 * len(failing)


def test_a_crawl_without_any_fingerprint_is_closed(tree: Site, tmp_path: Path) -> None:
    """Its pages link to each other: unfiltered, the crawl would never end."""
    crawl = crawl_with("Text", tree, tmp_path, CLOSESPIDER_PAGECOUNT=1000)
    assert crawl.finish() == 0, crawl.output[-3000:]
    assert "'finish_reason': 'bloom_no_fingerprints'" in crawl.output
    first, last = crawl.lines("ERROR")
    assert "The Bloom filter failed on <GET " in first
    assert "fingerprinters.Text, the REQUEST_FINGERPRINTER_CLASS, has not returned bytes" in last
    assert tree.total() < 500
