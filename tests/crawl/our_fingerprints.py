"""A plugin of pytest: Scrapy's `fingerprint` is ours, in a run of Scrapy's own tests."""

from collections.abc import Iterable

from scrapy import Request
from scrapy.utils import request as scrapy_request
from scrapy.utils.request import RequestFingerprinter

from scrapy_bloom.crawl.fingerprinting import fingerprint_function

scrapys = scrapy_request.fingerprint
ours = fingerprint_function(RequestFingerprinter())
answered: list[bytes] = []


def fingerprint(
    request: Request,
    *,
    include_headers: Iterable[bytes | str] | None = None,
    keep_fragments: bool = False,
) -> bytes:
    # Ours leaves the last of these to the function of that name, which is this one now.
    if include_headers or keep_fragments or request.meta.get("verbatim_url"):
        return scrapys(request, include_headers=include_headers, keep_fragments=keep_fragments)
    answered.append(ours(request))
    return answered[-1]


def pytest_configure() -> None:
    assert ours.__module__ == fingerprint_function.__module__  # it is not Scrapy's own method
    scrapy_request.fingerprint = fingerprint


def pytest_terminal_summary(terminalreporter) -> None:
    terminalreporter.write_line(f"ours has made {len(answered)} fingerprints")
