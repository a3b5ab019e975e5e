"""Sites that the benchmark serves, and which count what they are asked for."""

import importlib.util
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "example_project"
PYTHON_DOC = Path("/usr/share/doc/python3-doc/html")


class CountingSite:
    """A site, served by this process, which counts what it is asked for.

    Args:
        handler: answers; only this site may use it.
        start: path of the first page.
        secs: before each answer.

    Attributes:
        hits: requests for each address, however its query is ordered, whatever the answer.
        url: of the first page.
    """

    def __init__(
        self, handler: type[BaseHTTPRequestHandler], start: str = "", secs: float = 0.0
    ) -> None:
        self.hits: Counter[str] = Counter()
        self._lock = threading.Lock()
        get: Callable[[Any], None] = handler.do_GET  # type: ignore[attr-defined]

        def count_and_answer(request: Any) -> None:
            with self._lock:
                self.hits[address(request.path)] += 1
            time.sleep(secs)
            get(request)

        handler.do_GET = count_and_answer  # type: ignore[attr-defined]
        self._server = _Server(("127.0.0.1", 0), handler)
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/{start}"

    @property
    def total(self) -> int:
        """Requests so far."""
        return self.hits.total()

    def end(self) -> None:
        """Serve no more."""
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: object, client_address: object) -> None:
        """A killed crawl drops its connections: no news."""


@dataclass(frozen=True)
class Size:
    """How much of the example site there is."""

    sections: int
    articles: int  # in each section
    list_pages: int  # in each section
    tags: int


WHOLE = Size(12, 240, 12, 60)
PART = Size(1, 240, 12, 60)
TINY = Size(1, 24, 2, 12)


class ExampleSite(CountingSite):
    """The example project's site.

    Args:
        size: how much of it.
        secs: before each answer.

    Attributes:
        pages: how many different addresses answer with a page.
    """

    def __init__(self, size: Size, secs: float = 0.0) -> None:
        module: Any = site_module()
        module.SECTIONS, module.ARTICLES = size.sections, size.articles
        module.LIST_PAGES, module.TAGS = size.list_pages, size.tags
        self.pages: int = module.page_count()
        super().__init__(module._Handler, secs=secs)


class DocHandler(SimpleHTTPRequestHandler):
    """Python's documentation (Debian's package python3-doc)."""

    protocol_version = "HTTP/1.1"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, directory=str(PYTHON_DOC), **kwargs)

    def log_message(self, *_: Any) -> None:
        """The crawler's log is enough."""


class DocSite(CountingSite):
    """Python's documentation."""

    def __init__(self) -> None:
        super().__init__(type("Handler", (DocHandler,), {}), "index.html")


def site_module() -> ModuleType:
    """The example's module, as new: each site has a size of its own."""
    spec = importlib.util.spec_from_file_location("example_site", EXAMPLE / "example" / "site.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def address(url: str) -> str:
    """Path and sorted query, which make a page of such a site."""
    parts = urlsplit(url)
    query = urlencode(sorted(parse_qsl(parts.query)))
    return f"{parts.path}?{query}" if query else parts.path


@contextmanager
def served(size: Size, secs: float = 0.0) -> Iterator[ExampleSite]:
    """A new example site; ended on leaving."""
    site = ExampleSite(size, secs)
    try:
        yield site
    finally:
        site.end()
