"""URLs that a site makes up to break its crawler: filtered as Scrapy's own filter does."""

import html
import json
from collections import Counter
from pathlib import Path
from socketserver import StreamRequestHandler

from tests.support.crawls import SUPPORT, Crawl
from tests.support.sites import Site

SPIDER = SUPPORT / "hostile_spider.py"
SCRAPYS = "scrapy.dupefilters.RFPDupeFilter"
SAFE = "scrapy_bloom.CrashSafeScheduler"
MEGABYTE = 1_000_000

PATHS = [
    *("/nul\0in/it", "/nul%00", "/\ud800", "/\udcff?\udfff=\ud800#\udfff", "/\ufffe\uffff"),
    *("/100%", "/%", "/%zz", "/%2", "/%25%32%35", "/%ff%fe", "/%u1234", "/%C3%28", "/a%2Fb/../c"),
    *("/../../../etc/passwd", "/./././/x", "/x//y", "/;a=b;c", "/?", "/?&&&==", "/??a=?b", "/#"),
    *("/?a=1&a=1&b", "/?b&a=1", "/?a=%26&b=%3D", "/?q=" + "&" * 300, "/?" + "a[]=1&" * 200),
    *("/\t tab", "/new\nline", "/return\rhere", "/back\\slash", '/"quotes"', "/<script>", "/{}|^`"),
    *("/ä/ö?ü=ß", "/\u202eright-to-left", "/\u0000", "/\u3002", "/\U0001f600", "/e\u0301", "/\xe9"),
    "/" + "x" * MEGABYTE,
]
# None of them names another machine: whatever is done about them ends here.
PLACES = [
    *("http://[::1", "http://[zzz]/", "http://[::1]:99999/", "http://]/", "http://[]/"),
    *("http:///path", "http://", "http:", "http:/one", "http://:80/", "http://?", "http://#"),
    *("http://127.0.0.1:port/", "http://127.0.0.1:-1/", "http://127.0.0.1:99999999/"),
    *("http://127.0.0.1:0x50/", "http://127.0.0.1:/", "http://user:pass@/", "http://@/"),
    *("javascript:alert(1)", "mailto:a@b", "data:,", "data:;base64,%%%", "about:blank", "://", ""),
    *("nothing", "file:///dev/null/none", "HTTP://127.0.0.1:1/", "http://127.0.0.1%00:1/"),
]


class Anything(StreamRequestHandler):
    """Answers whatever it is asked for, however long: http.server gives up at 64 KiB."""

    def handle(self) -> None:
        while line := self.rfile.readline():
            path = line.split(b" ")[1].decode("latin-1")
            while self.rfile.readline() not in (b"\r\n", b""):
                pass
            body = page_of([*PATHS, *PLACES]) if path == "/start" else b"a leaf"
            self.server.hit(path)  # type: ignore[attr-defined]
            head = f"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: {len(body)}"
            self.wfile.write(f"{head}\r\n\r\n".encode() + body)


def page_of(links: list[str]) -> bytes:
    escaped = [html.escape(link) for link in links]
    raw = "".join(f'<a href="{link}">x</a>' for link in escaped).encode("utf-8", "surrogatepass")
    return (
        raw + b'<a href="/&#xD800;&#0;">x</a><a href=/\xff\xfe\x00>x</a><a href="&bad;%\xc3">x</a>'
    )


Outcomes = tuple[Counter[str], Counter[str]]


def outcomes(directory: Path, **settings: object) -> Outcomes:
    """Crawl; return what the spider got, and what the site was asked for."""
    site = Site(Anything)
    root = site.url.removesuffix("/")
    user = root.replace("//", "//user:p%40ss@")
    urls = [*(root + path for path in PATHS), *(user + path for path in PATHS[:5]), *PLACES]
    (directory / "urls.json").write_text(json.dumps(urls))
    settings = {
        "JOBDIR": "job",
        "RETRY_ENABLED": False,
        "URLLENGTH_LIMIT": 10 * MEGABYTE,  # by default, Scrapy drops what is that long
        **settings,
    }
    crawl = Crawl.finished(f"{root}/start", directory, settings, spider=SPIDER)
    assert "'finish_reason': 'finished'" in crawl.output
    assert not crawl.our_lines("ERROR") + crawl.our_lines("WARNING")
    site.end()
    done = (directory / "done").read_text().replace(root, "").replace(user, "USER")
    return Counter(done.splitlines()), site.hits


def test_a_crawl_of_hostile_links_ends_with_the_same_pages(
    tmp_path: Path,
) -> None:
    """The spider gets the same answers and failures as with Scrapy's filter."""
    (tmp_path / "theirs").mkdir()
    their_pages, their_hits = outcomes(tmp_path / "theirs", DUPEFILTER_CLASS=SCRAPYS)
    our_pages, our_hits = outcomes(tmp_path, SCHEDULER=SAFE)
    assert len(their_hits) > 40
    assert max(len(path) for path in their_hits) > MEGABYTE
    assert our_hits == their_hits
    assert our_pages == their_pages
