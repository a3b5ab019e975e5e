"""Web sites on loopback that tell which of their pages were asked for."""

import os
import threading
import time
from collections import Counter
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

PYTHON_DOC = Path("/usr/share/doc/python3-doc/html")


class Site(ThreadingHTTPServer):
    """A running site; `hits` counts the requests for each path that it answered with 200."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, handler: type[BaseHTTPRequestHandler] | partial) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.hits: Counter[str] = Counter()
        self.delay = 0.0
        self._lock = threading.Lock()
        self._under_way = 0
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/"

    def hit(self, path: str) -> None:
        with self._lock:
            self._under_way += 1
        time.sleep(self.delay)
        with self._lock:
            self._under_way -= 1
            self.hits[path] += 1

    def total(self) -> int:
        return sum(self.hits.values())

    def forget(self) -> None:
        """Start counting anew, once what a killed crawl had asked for is answered."""
        end = time.monotonic() + 10
        while self._under_way and time.monotonic() < end:
            time.sleep(0.01)
        self.hits.clear()

    def handle_error(self, request: object, client_address: object) -> None:
        """A killed crawl drops its connections: no news."""

    def end(self) -> None:
        self.shutdown()
        self.server_close()


class _Quiet:
    def log_message(self, *args: object) -> None:
        pass


class _Directory(_Quiet, SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Site

    def send_response(self, code: int, message: str | None = None) -> None:
        if code == 200:
            self.server.hit(self.path)
        super().send_response(code, message)


class _Tree(_Quiet, BaseHTTPRequestHandler):
    """Pages /p/0 to /p/<n-1>, each linking to its children in a binary tree, and to others."""

    protocol_version = "HTTP/1.1"
    server: Site
    pages = 0

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        number = 0 if path == "/" else int(path.removeprefix("/p/")) if path[:3] == "/p/" else -1
        if not 0 <= number < self.pages:
            self._send(404, b"")
            return
        self.server.hit(f"/p/{number}")
        children = [n for n in (2 * number + 1, 2 * number + 2) if n < self.pages]
        links = [f"/p/{n}?b=1&amp;a=2#top" for n in children]
        links += [f"/p/{n}?a=2&amp;b=1" for n in children]
        links += ["/", f"/p/{number // 2}?a=2&amp;b=1#end"] if number else []
        self._send(200, "".join(f'<a href="{link}">x</a>' for link in links).encode())

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def tree_site(pages: int) -> Site:
    """A generated site of so many pages, each found under several URLs."""
    return Site(type("Tree", (_Tree,), {"pages": pages}))


def python_doc_site() -> Site:
    """The pages of Debian's package python3-doc."""
    return Site(partial(_Directory, directory=os.fspath(PYTHON_DOC)))
