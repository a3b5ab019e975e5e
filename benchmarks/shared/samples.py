"""What to measure with: a crawler, URLs, fingerprints."""

from collections.abc import Iterator
from hashlib import sha1
from pathlib import Path
from typing import Any

from scrapy.crawler import Crawler
from scrapy.utils.test import get_crawler

UNUSED = 10**12  # fingerprints from that number on are none of a crawl's
_SECTIONS = ("books", "garden-and-outdoor", "kitchen", "music", "office-supplies", "toys")


def crawler(job_dir: Path, **settings: Any) -> Crawler:
    """A crawler as a dupefilter finds it when a job begins; it crawls nothing."""
    return get_crawler(
        settings_dict={"JOBDIR": str(job_dir), "TELNETCONSOLE_ENABLED": False, **settings}
    )


def url(number: int) -> str:
    """A URL as shops have them, with a path and a query: 80 to 96 characters."""
    return (
        f"https://www.shop-{number % 97}.example/{_SECTIONS[number % 6]}/product-{number:08}.html"
        f"?sort=price&page={number % 50}&ref=list"
    )


def fingerprints(start: int, count: int) -> Iterator[bytes]:
    """Fingerprints number `start` and following: 20 bytes each, as Scrapy's are, none kept."""
    for number in range(start, start + count):
        yield sha1(b"%d" % number, usedforsecurity=False).digest()
