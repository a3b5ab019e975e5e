"""Our fingerprints are Scrapy's, whatever the request."""

import logging
import tracemalloc
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scrapy import FormRequest, Request
from scrapy.http import JsonRequest
from scrapy.utils.request import RequestFingerprinter, fingerprint
from scrapy_redis.dupefilter import RFPDupeFilter

from scrapy_bloom import ScrapyRedisFingerprinter
from scrapy_bloom.crawl.fingerprinting import (
    LONGEST_REMEMBERED,
    REMEMBERED_URLS,
    fingerprint_function,
)

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
    assert FAST.__module__ == "scrapy_bloom.crawl.fingerprinting"


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


ONE_PAGE = "https://example.com/a?b=1&a=2"
LIKE_IT = [ONE_PAGE, f"{ONE_PAGE}#x", "https://example.com/a?a=2&b=1", "https://EXAMPLE.com/a"]


@given(
    st.lists(
        st.builds(
            lambda url, method, body, verbatim: (
                lambda: Request(url, method=method, body=body, meta={"verbatim_url": verbatim})
            ),
            st.sampled_from(LIKE_IT),
            st.sampled_from(["GET", "get", "HEAD", "POST"]),
            st.sampled_from([None, b"", b"body"]),
            st.booleans(),
        ),
        max_size=30,
    )
)
def test_what_is_remembered_of_a_url_is_not_taken_for_another_request(
    made: list[Callable[[], Request]],
) -> None:
    fast = fingerprint_function(RequestFingerprinter())
    for make in made:
        assert fast(make()) == fingerprint(make())


def test_a_url_that_was_forgotten_in_between() -> None:
    fast = fingerprint_function(RequestFingerprinter())
    urls = [f"https://example.com/{i}" for i in range(REMEMBERED_URLS + 100)]
    for _ in range(2):
        assert [fast(Request(url)) for url in urls] == [fingerprint(Request(url)) for url in urls]


def test_no_more_is_remembered_than_the_documented_3_mb() -> None:
    fast = fingerprint_function(RequestFingerprinter())
    fast(Request("https://example.com/"))
    start = "https://example.com/"
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for i in range(3 * REMEMBERED_URLS):
            fast(Request(f"{start}{i:0{LONGEST_REMEMBERED - len(start)}d}"))
            fast(Request(f"{start}{i:0100000d}" if i < 100 else start))
        kept = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert 1.5e6 < kept < 3e6  # it does remember


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


def test_what_somebody_has_patched_is_left_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it differs for some requests only, which no sample shows."""
    patched = RequestFingerprinter()
    patched._fingerprint = partial(fingerprint, include_headers=["Accept-Language"])  # type: ignore[attr-defined]
    function = fingerprint_function(patched)
    german, french = (
        Request("https://example.com/", headers={"Accept-Language": name}) for name in ("de", "fr")
    )
    assert function(german) != function(french)

    def by_key(self: RequestFingerprinter, request: Request) -> bytes:
        return request.meta["key"] if "key" in request.meta else fingerprint(request)

    monkeypatch.setattr(RequestFingerprinter, "fingerprint", by_key)
    function = fingerprint_function(RequestFingerprinter())
    assert function(Request("https://example.com/", meta={"key": b"a key"})) == b"a key"


def test_a_subclass_is_left_to_itself() -> None:
    class Own(RequestFingerprinter):
        def fingerprint(self, request: Request) -> bytes:
            return b"own"

    function = fingerprint_function(Own())
    assert function(Request("https://example.com/")) == b"own"
    assert function.__func__ is Own.fingerprint  # type: ignore[attr-defined] # nothing between


def test_another_fingerprinter_is_left_to_itself() -> None:
    class Other:
        def fingerprint(self, request: Request) -> bytes:
            return b"other"

    assert fingerprint_function(Other())(Request("https://example.com/")) == b"other"


def test_a_scrapy_that_computes_otherwise_is_noticed(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)

    def new(self: RequestFingerprinter, request: Request) -> bytes:
        return b"new " + fingerprint(request)

    new.__module__ = RequestFingerprinter.__module__
    monkeypatch.setattr(RequestFingerprinter, "fingerprint", new)
    found = fingerprint_function(RequestFingerprinter())(Request("https://example.com/"))
    assert found.startswith(b"new ")
    assert "using its own" in caplog.text
