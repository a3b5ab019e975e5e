"""A local web site of some 3,000 pages, with the duplicates of real ones.

Nothing is stored: each page is made from its number when it is requested. Run it alone with
`python -m example.site`, or let the spider serve it.
"""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, urlsplit

SECTIONS = 12
ARTICLES = 240  # in each section
LIST_PAGES = 12  # in each section
TAGS = 60
TRACKING = ("utm_source=newsletter", "utm_campaign=spring&utm_medium=mail", "fbclid=IwAR0x1")
HOST = "127.0.0.1"


def page_count() -> int:
    """Different pages that answer 200 when everything is crawled once."""
    articles = sum(1 for n in range(SECTIONS * ARTICLES) if status_of(n) == 200)
    return 1 + SECTIONS * LIST_PAGES + articles + TAGS


def status_of(article: int) -> int:
    """Some articles are gone (404), some are broken (500), as on any grown site."""
    if article % 97 == 13:
        return 404
    if article % 211 == 17:
        return 500
    return 200


def _navigation() -> list[str]:
    return ["/", *(f"/s/{section}/?page=1&sort=date" for section in range(SECTIONS))]


def _list_page(section: int, page: int) -> list[str]:
    per_page = ARTICLES // LIST_PAGES
    first = section * ARTICLES + (page - 1) * per_page
    articles = [f"/a/{number}" for number in range(first, first + per_page)]
    # The query of the same page in either order: the fingerprint sorts it.
    pages = [
        f"/s/{section}/?page={n}&sort=date" if n % 2 else f"/s/{section}/?sort=date&page={n}"
        for n in range(1, LIST_PAGES + 1)
    ]
    return articles + pages


def _article(number: int) -> list[str]:
    total = SECTIONS * ARTICLES
    near, far = (number + 1) % total, (number * 7 + 3) % total
    return [
        f"/a/{near}?{TRACKING[number % 3]}",
        f"/a/{far}#comments",
        f"/a/{far}#top",
        f"/old/{(number * 5 + 1) % total}",  # moved: redirects to the article
        f"/t/{number % TAGS}",
        f"/t/{(number // TAGS) % TAGS}",
        f"/s/{number // ARTICLES}/?sort=date&page=1",
    ]


def links(path: str, query: dict[str, str]) -> list[str] | None:
    """The links on a page, or None if there is no such page."""
    match path.strip("/").split("/"):
        case [""]:
            return []
        case ["s", section] if int(section) < SECTIONS:
            page = int(query.get("page", "1"))
            return _list_page(int(section), page) if 1 <= page <= LIST_PAGES else None
        case ["a", number] if int(number) < SECTIONS * ARTICLES:
            return _article(int(number))
        case ["t", tag] if int(tag) < TAGS:
            return [f"/a/{number}" for number in range(int(tag), SECTIONS * ARTICLES, TAGS)]
    return None


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        if url.path.startswith("/old/"):
            self._send(301, b"", ("Location", url.path.replace("/old/", "/a/")))
            return
        try:
            found = links(url.path, dict(parse_qsl(url.query)))
        except ValueError:
            found = None
        status = 404 if found is None else 200
        if url.path.startswith("/a/") and found is not None:
            status = status_of(int(url.path[3:]))
        anchors = "\n".join(
            f'<li><a href="{link.replace("&", "&amp;")}">{link.partition("?")[0]}</a></li>'
            for link in [*_navigation(), *(found or [])]
        )
        page = f"<!doctype html><title>{url.path}</title><h1>{url.path}</h1><ul>{anchors}</ul>"
        self._send(status, page.encode(), ("Content-Type", "text/html; charset=utf-8"))

    def _send(self, status: int, body: bytes, header: tuple[str, str]) -> None:
        self.send_response(status)
        self.send_header(*header)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """The crawler's log is enough."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


def serve(port: int) -> tuple[ThreadingHTTPServer, str]:
    """Serve the site in a thread, on loopback; port 0 takes a free one.

    Returns the server (end it with `shutdown` and `server_close`) and the URL of its home page.
    """
    server = _Server((HOST, port), _Handler)
    threading.Thread(target=server.serve_forever, name="example site", daemon=True).start()
    return server, f"http://{HOST}:{server.server_address[1]}/"


if __name__ == "__main__":
    _, home = serve(8970)
    input(f"{home} - Enter to stop\n")
