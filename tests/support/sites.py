"""Web sites on loopback that count the requests of their pages."""

import math
import os
import socket
import threading
import time
from collections import Counter
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

PYTHON_DOC = Path("/usr/share/doc/python3-doc/html")
LIMIT = 120.0  # seconds that any single wait may take


class Site(ThreadingHTTPServer):
    """A running site."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, handler: type[BaseHTTPRequestHandler] | partial) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.hits: Counter[str] = Counter()  # requests for each path that it answered with 200
        self.delay = 0.0  # seconds before each answer
        self.under_way = 0  # requests that are not answered yet
        self._held = 0
        self._left = math.inf  # answers, until it holds back the others
        self._connections = 0
        self._changed = threading.Condition()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/"

    def hit(self, path: str) -> None:
        with self._changed:
            self.under_way += 1
            self._held += 1
            self._changed.wait_for(lambda: self._left > 0, LIMIT)
            self._held -= 1
            self._left -= 1
        time.sleep(self.delay)
        with self._changed:
            self.under_way -= 1
            self.hits[path] += 1

    def hold_after(self, answers: float) -> None:
        """Give so many more answers, and hold back all others until `release`."""
        with self._changed:
            self._left = answers
            self._changed.notify_all()

    def is_holding(self) -> bool:
        """Return whether all is answered but what is held back, and something is."""
        with self._changed:
            return 0 < self._held == self.under_way and self._left <= 0

    def release(self) -> None:
        """Answer what was held back, and all that comes."""
        self.hold_after(math.inf)

    def total(self) -> int:
        return sum(self.hits.values())

    def settle(self) -> None:
        """Wait until all is answered that crawls asked for which have ended, or were killed."""
        self.release()
        # Connections are accepted in their order: those of the crawls are, when this one is.
        with socket.create_connection(self.server_address, LIMIT) as last:
            last.shutdown(socket.SHUT_WR)
            last.recv(1)
        with self._changed:
            assert self._changed.wait_for(lambda: not self._connections, LIMIT), "a crawl goes on"

    def forget(self) -> None:
        """Start counting anew, once what a killed crawl had asked for is answered."""
        self.settle()
        self.hits.clear()

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._changed:
            self._connections += 1
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._changed:
                self._connections -= 1
                self._changed.notify_all()

    def handle_error(self, request: object, client_address: object) -> None:
        """Print nothing: a killed crawl drops its connections."""

    def end(self) -> None:
        self.shutdown()
        self.server_close()

    def __exit__(self, *args: object) -> None:
        self.end()


class _Quiet:
    wbufsize = -1  # an answer is one packet: the second of two would wait for 40 ms (Nagle)

    def log_message(self, *args: object) -> None:
        pass


class _Directory(_Quiet, SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Site
    parts: tuple[str, ...] = ("/",)

    def do_GET(self) -> None:
        if self.path == "/" or self.path.startswith(self.parts):
            super().do_GET()
        else:
            self.send_error(404)

    def send_response(self, code: int, message: str | None = None) -> None:
        if code == 200:
            self.server.hit(self.path)
        super().send_response(code, message)


class _Tree(_Quiet, BaseHTTPRequestHandler):
    """Pages /p/0 to /p/<n-1>, each linking to its children in a tree, and to others."""

    protocol_version = "HTTP/1.1"
    server: Site
    pages, children = 0, 2

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        if path.startswith("/added/"):  # no page leads there
            self.server.hit(path)
            self._send(200, b"")
            return
        number = 0 if path == "/" else int(path.removeprefix("/p/")) if path[:3] == "/p/" else -1
        if not 0 <= number < self.pages:
            self._send(404, b"")
            return
        self.server.hit(f"/p/{number}")
        first = self.children * number + 1
        children = range(first, min(first + self.children, self.pages))
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


def tree_site(pages: int, children: int = 2) -> Site:
    """Serve a tree of pages, each with several URLs and so many children."""
    return Site(type("Tree", (_Tree,), {"pages": pages, "children": children}))


def python_doc_site(*parts: str) -> Site:
    """Serve the pages of Debian's package python3-doc: all, or the first one and some parts."""
    handler = type("Part", (_Directory,), {"parts": parts or _Directory.parts})
    return Site(partial(handler, directory=os.fspath(PYTHON_DOC)))


class _Scripted(_Quiet, BaseHTTPRequestHandler):
    """Answers as `Site.answers` says for each path: with the first of a list, but the last stays.

    A number is a status, a text a redirect to there, None a connection that is dropped, bytes are
    a page, and a tuple a page with links to all of its paths. What is not in there is a page
    without links.
    """

    protocol_version = "HTTP/1.1"
    server: "ScriptedSite"

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        self.server.hit(path)
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        answers = self.server.answers.get(path, [()])
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if answer is None:
            self.close_connection = True
        elif isinstance(answer, int):
            self._send(answer, b"")
        elif isinstance(answer, bytes):
            self._send(200, answer)
        elif isinstance(answer, str):
            self._send(302, b"", ("Location", answer))
        else:
            self._send(200, "".join(f'<a href="{link}">x</a>' for link in answer).encode())

    def _send(self, status: int, body: bytes, *headers: tuple[str, str]) -> None:
        self.send_response(status)
        for header in (("Content-Type", "text/html"), *headers):
            self.send_header(*header)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET  # noqa: N815 - http.server's name


class ScriptedSite(Site):
    """A site with scripted answers, which counts all requests in `hits`."""

    def __init__(self, answers: dict[str, list]) -> None:
        super().__init__(_Scripted)
        self.answers = answers
