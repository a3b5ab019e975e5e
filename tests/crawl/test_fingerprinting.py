"""Our fingerprints are Scrapy's, whatever the request."""

import contextlib
import logging
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scrapy import Request
from scrapy.http import HtmlResponse
from scrapy.utils.request import RequestFingerprinter, fingerprint
from scrapy_redis.dupefilter import RFPDupeFilter

from scrapy_bloom import ScrapyRedisFingerprinter
from scrapy_bloom.crawl.fingerprinting import fingerprint_function, plain_fingerprint
from tests.support.machine import REAL_SITES
from tests.support.sites import PYTHON_DOC


def fast(request: Request) -> bytes:
    return fingerprint_function(RequestFingerprinter())(request)


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
    function = fingerprint_function(RequestFingerprinter())
    assert function.__module__ == "scrapy_bloom.crawl.fingerprinting"


# Mostly what a URL that is canonical already is made of, and sometimes not.
_ANY = st.sampled_from([*map(chr, range(32, 127)), "é", "\u2028", *"/.%:;&=+#?"])
_ESCAPES = st.integers(0, 255).map("%{:02X}".format)


def _words(alphabet: str, *, strange: st.SearchStrategy[str] = _ANY) -> st.SearchStrategy[str]:
    usual = st.text(alphabet, max_size=6)
    return st.lists(st.one_of(usual, usual, usual, strange), max_size=4).map("".join)


PLAIN_URLS = st.builds(
    "{}://{}{}{}{}{}".format,
    st.sampled_from(["http", "https", "https", "Https", "ftp"]),
    st.from_regex(r"[a-z0-9.-]{1,12}(\.com)?", fullmatch=True),
    st.sampled_from(["", "", "", ":80", ":443", ":0", ":080", ":59999", ":65535", ":65536"]),
    st.one_of(
        st.just(""),
        _words("/ab01AZ_~!$&'()*+,:=@.-|", strange=st.one_of(_ANY, _ESCAPES)).map("/{}".format),
    ),
    st.one_of(
        st.just(""),
        st.lists(
            st.builds("{}={}".format, st.text("ab1-._~+", max_size=3), _words("abZ01-._~+")),
            max_size=5,
        ).map(lambda pairs: f"?{'&'.join(pairs)}"),
        _words("ab=&+").map("?{}".format),
    ),
    st.one_of(st.just(""), _words("ab/?#=.").map("#{}".format)),
)


@given(
    st.one_of(URLS, PLAIN_URLS),
    st.sampled_from(["GET", "GET", "post", "DELETE", "Ü"]),
    st.one_of(st.none(), st.binary(max_size=30), st.text(max_size=10)),
    st.booleans(),
)
@settings(max_examples=500)
def test_the_same_as_scrapys(
    url: str, method: str, body: bytes | str | None, verbatim: bool
) -> None:
    meta = {"verbatim_url": True} if verbatim else None
    try:
        plain = fingerprint(Request(url))
    except (ValueError, UnicodeError):
        assert plain_fingerprint(url) is None  # a list of URLs would not have made a request of it
        return
    assert plain_fingerprint(url) in {None, plain}
    try:
        request = Request(url, method=method, body=body, meta=meta)
        expected = fingerprint(request)
    except (ValueError, UnicodeError):
        return  # Scrapy itself refuses it
    assert fast(request) == expected


PLAIN = [
    "https://www.example.com/category/7/item-1.html",
    "http://example.com",
    "http://example.com:8080/",
    "http://127.0.0.1:59999//a//",
    "http://a..b.-/",
    f"http://{'a' * 64}.{'b.' * 150}/",  # longer than any host can be
    "https://xn--bcher-kva.example/xn--",
    "https://example.com/~user/a_b-c.d,e",
    "https://example.com/caf%C3%A9%20au%20lait%2F1",
    "https://example.com/#!/a?b=c/../%zz#",
    "https://example.com/?a=",
    "https://example.com/?=",
    "https://example.com/a?b=2&a=1&b=1",
    "https://example.com/a?a-b=1&a=1&a.b=1&a1=1&a~=1&a=",
    "https://example.com/a?q=two+words&q=two-words&q=+&q=",
]
OTHERS = [
    *("HTTPS://example.com/", "ftp://example.com/", "https://Example.com/"),
    *("https://user@example.com/", "https://example.com:080/", "https://[::1]/"),
    *("https://bücher.example/", "https://example.com/a/../b", "https://example.com/.well-known/"),
    *("https://example.com/a;b", "https://example.com/é", "https://example.com/%c3%a9"),
    *("https://example.com/%2E%2E/", "https://example.com/100%", "https://example.com/a\n"),
    *("https://example.com/a?", "https://example.com/a?b=c=d", "https://example.com/a?b=1&&c=2"),
    *("https://example.com/a?b=%20", "https://example.com/a?b=1#é"),
]


@pytest.mark.parametrize("url", PLAIN)
def test_urls_of_which_nothing_has_to_be_made(url: str) -> None:
    assert plain_fingerprint(url) == fast(Request(url)) == fingerprint(Request(url))


@pytest.mark.parametrize("url", OTHERS)
def test_urls_that_are_left_to_w3lib(url: str) -> None:
    assert plain_fingerprint(url) is None
    with contextlib.suppress(ValueError):  # a port that is none
        assert fast(Request(url)) == fingerprint(Request(url))


@pytest.mark.parametrize(
    "part",
    ["a", "/", "//a", ".", "&", "%C3", "%C", "a=b&", "+", "=", "?a=", "#", ":80", "a%C3/"],
)
def test_a_url_of_a_megabyte_has_no_worst_case(part: str) -> None:
    """A pattern that reads anything twice would take hours for it."""
    many = part * (1_000_000 // len(part))
    for start in ("https://", "https://a/", "https://a/?a=", "http://a#"):
        for end in ("", "\n"):
            url = f"{start}{many}{end}"
            assert plain_fingerprint(url) is None or not end


@given(URLS, st.sampled_from(["GET", "post"]), st.one_of(st.none(), st.binary(max_size=30)))
def test_the_same_as_those_of_scrapy_redis(url: str, method: str, body: bytes | None) -> None:
    theirs = RFPDupeFilter(None, "key")
    try:
        request = Request(url, method=method, body=body)
        expected = theirs.request_fingerprint(request)
    except (ValueError, UnicodeError):
        return
    assert ScrapyRedisFingerprinter().fingerprint(request).hex() == expected


def test_a_subclass_is_left_to_itself() -> None:
    class Own(RequestFingerprinter):
        def fingerprint(self, request: Request) -> bytes:
            return b"own"

    function = fingerprint_function(Own())
    assert function(Request("https://example.com/")) == b"own"
    assert function.__func__ is Own.fingerprint  # type: ignore[attr-defined] # nothing between


def of_url(part: str) -> Callable[[Request], bool]:
    return lambda request: part in request.url


PARTS = [
    *"AZaz09_~!$&'()*+,:=@-",
    *("%00", "%1F", "%20", "%FF", "~&", "+_", "=+", "a.b", "a-=", "#x", "#!", "/!$", ":8080"),
    *("http:", "data:text/plain,x", "0x7f", "user:pass@", ":443/", "%7Ehome/../", "%zz", "%20b/"),
    *("https://example.com/a%20b/", "https://example.com/%22", "/?b=2&a=1"),
]


@pytest.mark.parametrize(
    "differs",
    [
        *map(of_url, PARTS),
        lambda request: request.url in {"https://example.com", "http://0x7f.1/"},
        lambda request: request.method == "POST",
        lambda request: request.body == b'\x00"body"\xff',
        lambda request: request.body == "ü".encode(),
        lambda request: "X-Header" in request.headers,
        lambda request: request.cookies == {"c": "1"},
    ],
)
def test_a_scrapy_that_computes_otherwise_is_noticed(
    differs: Callable[[Request], bool], caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever kind of request it treats in a new way."""
    caplog.set_level(logging.INFO)

    def new(request: Request) -> bytes:
        return b"new " + fingerprint(request) if differs(request) else fingerprint(request)

    theirs = RequestFingerprinter()
    theirs.fingerprint = new  # type: ignore[method-assign]
    assert fingerprint_function(theirs) is new
    assert "using its own" in caplog.text


@pytest.mark.parametrize("_site", REAL_SITES)
def test_the_links_of_a_real_site(_site: str) -> None:
    links = set()
    for page in sorted(PYTHON_DOC.rglob("*.html"))[::25]:
        response = HtmlResponse(f"https://docs.python.org/3/{page.name}", body=page.read_bytes())
        links |= {
            request.url for request in response.follow_all(css='a[href]:not([href^="mailto:"])')
        }
    assert len(links) > 1000
    ours = fingerprint_function(RequestFingerprinter())
    plain = 0
    for link in links:
        expected = fingerprint(Request(link))
        assert ours(Request(link)) == expected, link
        if (found := plain_fingerprint(link)) is not None:
            assert found == expected, link
            plain += 1
    assert plain > len(links) / 2  # most are, of any site
