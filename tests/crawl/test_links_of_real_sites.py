"""Our fingerprints of links that no one here wrote."""

import pytest
from scrapy import Request
from scrapy.http import HtmlResponse
from scrapy.utils.request import RequestFingerprinter, fingerprint

from scrapy_bloom.crawl.fingerprinting import fingerprint_function, plain_fingerprint
from tests.support.machine import REAL_SITES
from tests.support.sites import PYTHON_DOC


@pytest.mark.parametrize("_site", REAL_SITES)
def test_the_links_of_a_real_site(_site: str) -> None:
    links = set()
    for page in sorted(PYTHON_DOC.rglob("*.html"))[::5]:
        response = HtmlResponse(f"https://docs.python.org/3/{page.name}", body=page.read_bytes())
        links |= {
            request.url for request in response.follow_all(css='a[href]:not([href^="mailto:"])')
        }
    assert len(links) > 5000
    ours = fingerprint_function(RequestFingerprinter())
    plain = 0
    for link in links:
        expected = fingerprint(Request(link))
        assert ours(Request(link)) == expected, link
        if (found := plain_fingerprint(link)) is not None:
            assert found == expected, link
            plain += 1
    assert plain > len(links) / 2  # most are, of any site
