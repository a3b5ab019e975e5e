"""A crawl notices that its requests have other fingerprints than in the crawls before."""

import json
from pathlib import Path

import pytest
from scrapy import Request

from scrapy_bloom.crawl.fingerprinting import Sample
from tests.support.crawls import Crawl
from tests.support.sites import ScriptedSite
from tests.support.workspace import in_redis

SAFE = {"SCHEDULER": "scrapy_bloom.CrashSafeScheduler"}
WRAPPER = """
from scrapy.utils.request import fingerprint
from w3lib.url import url_query_cleaner

class Wrapper:
    def fingerprint(self, request):
        url = url_query_cleaner(request.url, [{parameter!r}], remove=True)
        return fingerprint(request.replace(url=url))
"""
LINE = "{} of {} requests sampled by earlier crawls have other fingerprints now"


@pytest.fixture(params=["JOBDIR, crash-safe", "Redis"])
def place(request: pytest.FixtureRequest, key: str) -> dict[str, object]:
    return in_redis(key) if request.param == "Redis" else {"JOBDIR": "job", **SAFE}


def warnings_of(site: ScriptedSite, path: Path, place: dict, parameter: str) -> list[str]:
    (path / "wrapper.py").write_text(WRAPPER.format(parameter=parameter))
    settings = {**place, "REQUEST_FINGERPRINTER_CLASS": "wrapper.Wrapper"}
    crawl = Crawl.finished(site.url, path, settings)
    return [line for line in crawl.our_lines("WARNING") if "sampled" in line]


@pytest.mark.parametrize(("pages", "sampled"), [(30, 20), (7, 5)])
def test_a_changed_wrapper(pages: int, sampled: int, place: dict, tmp_path: Path) -> None:
    links = [f"/p/{number}?sid={number:032x}&page=1" for number in range(pages)]
    with ScriptedSite({"/": [tuple(links)]}) as site:
        for parameter, warns in [("sid", False), ("page", True), ("sid", False)]:
            lines = warnings_of(site, tmp_path, place, parameter)
            assert len(lines) == warns
            assert all(LINE.format(sampled, sampled) in line for line in lines)


def test_a_fingerprinter_of_another_name_is_refused(place: dict, tmp_path: Path) -> None:
    with ScriptedSite({}) as site:
        warnings_of(site, tmp_path, place, "sid")
        site.forget()
        line = Crawl(site.url, tmp_path, place).refusal()
        assert "REQUEST_FINGERPRINTER_CLASS = 'wrapper.Wrapper'" in line
        assert "'scrapy.utils.request.RequestFingerprinter'" in line
        assert not site.hits


def test_no_secret_is_stored() -> None:
    sample = Sample(lambda request: request.url.encode(), "")
    secret = "https://me:s3cret@example.com/p;sid=9bE7?key=0cafe&q=%C3%A9&empty=#access=s3cret"
    assert sample.add(Request(secret))
    ((url, _),) = json.loads(str(sample))
    assert url == "https://example.com/p;sid=1aA1?key=1aaaa&q=%A1%A1&empty=#access=a1aaaa"


@pytest.mark.parametrize(
    "text", ["", "[]", "{", "7", "[1]", '{"x": 1}', '{"x": "1"}', "[" * 100_000]
)
def test_a_damaged_sample(text: str) -> None:
    sample = Sample(lambda request: request.url.encode(), text)
    assert sample.changed == 0
