"""Our fingerprints are Scrapy's, whatever the request."""

import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scrapy import FormRequest, Request
from scrapy.http import JsonRequest
from scrapy.utils.request import RequestFingerprinter, fingerprint
from scrapy_redis.dupefilter import RFPDupeFilter

from scrapy_bloom import ScrapyRedisFingerprinter
from scrapy_bloom.fingerprinting import fingerprint_function

FAST = fingerprint_function(RequestFingerprinter())

URLS = st.builds(
    "{}://{}{}{}{}{}".format,
    st.sampled_from(["http", "https", "HTTP", "ftp", "file"]),
    st.sampled_from(["example.com", "EXAMPLE.com:80", "user:pw@example.com", "bücher.example", ""]),
    st.text(max_size=5).map(lambda text: f"/{text}"),
    st.text(max_size=20),
    st.one_of(st.just(""), st.text(alphabet="abc=&;%zé?/ +", max_size=20).map("?{}".format)),
    st.one_of(st.just(""), st.text(max_size=5).map("#{}".format)),
)


def test_the_fast_way_is_taken_with_this_version_of_scrapy() -> None:
    assert FAST.__module__ == "scrapy_bloom.fingerprinting"


@given(
    URLS,
    st.sampled_from(["GET", "post", "DELETE", "Ü"]),
    st.one_of(st.none(), st.binary(max_size=30), st.text(max_size=10)),
    st.booleans(),
)
@settings(max_examples=500)
def test_the_same_as_scrapys(
    url: str, method: str, body: bytes | str | None, verbatim: bool
) -> None:
    meta = {"verbatim_url": True} if verbatim else None
    try:
        request = Request(url, method=method, body=body, meta=meta)
        expected = fingerprint(request)
    except (ValueError, UnicodeError):
        return  # Scrapy itself refuses it
    assert FAST(request) == expected


@given(URLS, st.sampled_from(["GET", "post"]), st.one_of(st.none(), st.binary(max_size=30)))
def test_the_same_as_those_of_scrapy_redis(url: str, method: str, body: bytes | None) -> None:
    theirs = RFPDupeFilter(None, "key")
    try:
        request = Request(url, method=method, body=body)
        expected = theirs.request_fingerprint(request)
    except (ValueError, UnicodeError):
        return
    assert ScrapyRedisFingerprinter().fingerprint(request).hex() == expected


@pytest.mark.parametrize(
    "request_",
    [
        FormRequest("https://example.com/", formdata={"a": "1", "b": "ü"}),
        JsonRequest("https://example.com/", data={"a": [1, None]}),
        Request("https://example.com/", headers={"Cookie": "a=1"}, cookies={"b": "2"}),
        Request("https://example.com/" + "x" * 100_000),
    ],
    ids=["form", "json", "headers", "long"],
)
def test_other_kinds_of_request(request_: Request) -> None:
    assert FAST(request_) == fingerprint(request_)


def test_a_subclass_is_left_to_itself() -> None:
    class Own(RequestFingerprinter):
        def fingerprint(self, request: Request) -> bytes:
            return b"own"

    assert fingerprint_function(Own())(Request("https://example.com/")) == b"own"


def test_another_fingerprinter_is_left_to_itself() -> None:
    class Other:
        def fingerprint(self, request: Request) -> bytes:
            return b"other"

    assert fingerprint_function(Other())(Request("https://example.com/")) == b"other"


def test_a_scrapy_that_computes_otherwise_is_noticed(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(
        RequestFingerprinter, "fingerprint", lambda self, request: b"new " + fingerprint(request)
    )
    found = fingerprint_function(RequestFingerprinter())(Request("https://example.com/"))
    assert found.startswith(b"new ")
    assert "using its own" in caplog.text
