"""The built site: what a browser shows of it, and what its search finds."""

import http.server
import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.support.browser import CHROMIUM, Browser, browser
from tests.support.documents import BLOCK, DOCUMENTS, ROOT, lines_of_log
from tests.support.messages import GAP, entries

# What a user pastes, and the heading under which it is explained.
PASTED = {
    'DUPEFILTER_CLASS is "scrapy.dupefilters.RFPDupeFilter", but CrashSafeScheduler stores a '
    "request and its fingerprint in one step, which only the filter of scrapy_bloom can do; set "
    'DUPEFILTER_CLASS = "scrapy_bloom.BloomDupeFilter", or "scrapy.dupefilters.BaseDupeFilter" to '
    "filter nothing": "two-settings-contradict-each-other",
    "jobs/shop is in use by another running crawl; wait for it to end, end it with scrapy "
    "bloom stop, or use another JOBDIR": "the-directory-is-in-use",
    "<GET https://shop.example/p/1734> was in flight in 4 processes that died, the last time "
    "alone: it is no longer crawled. It is kept in jobs/shop/bloom.sqlite: `scrapy bloom queue "
    "--dead` shows it": "a-request-kills-the-process",
    "Unable to serialize request: <GET https://shop.example/p/3> - reason: Can't pickle local "
    "object 'Shop.parse.<locals>.<lambda>' - it is kept in memory, and if this process dies, the "
    "pages that link to it are crawled again - no more unserializable requests will be logged "
    "(stats being collected)": ("a-request-cannot-be-serialized"),
    "redis://redis.example:6379/0 does not answer: Error 111 connecting to redis.example:6379. "
    "Connection refused.. The crawl waits for it, up to 30 seconds (BLOOM_REDIS_DEADLINE_SECS)": (
        "the-server-does-not-answer"
    ),
    "--drop-host removes pending requests: leave --failed and --dead out": (
        "the-command-line-is-not-complete-or-not-valid"
    ),
    "BLOOM_EROR_RATE is not a setting of scrapy_bloom; did you mean BLOOM_ERROR_RATE?": (
        "a-setting-has-a-value-that-is-not-allowed"
    ),
    "BLOOM_EXPECTED_REQUESTS is '50x'; set it to a whole number from 1 to 1,000,000,000,000, for "
    "example 1_000_000 or 5M": "a-setting-has-a-value-that-is-not-allowed",
    "BLOOM_RUN is 'monday', the name of an earlier run of jobs/shop/bloom.sqlite, so there is "
    "nothing to do in the current run 'tuesday'. To begin a new run, set a name that it has not "
    "had": "the-second-run-crawls-nothing",
    "jobs/shop holds no filter; give a JOBDIR": "there-is-no-filter-or-queue-in-this-location",
}
OF_THE_SERVER = {
    "DB index is out of range": "the-server-refuses-the-user-the-command-or-the-url",
    "WRONGPASS invalid username-password pair or user is disabled.": (
        "the-server-refuses-the-user-the-command-or-the-url"
    ),
}
# The same for INFO lines, which are on the page about stats.
PASTED_LINES = [
    "Taking over the queue of Scrapy's own scheduler in jobs/old/requests.queue",
    (
        "2026-11-26 07:22:04 [scrapy_bloom.job.filter] INFO: The last process did not close "
        "jobs/k1: it was killed, or the machine went down. Queue and filter are complete: nothing "
        "is lost, and the requests that were in flight are crawled again"
    ),
    "Importing the requests that Scrapy recorded in jobs/old/requests.seen",
]
# What a reader types, and the page that comes first.
TYPED = {
    "sizing": "sizing",
    "BLOOM_RUN": "settings",
    "scrapy-redis": "scrapy-redis",
    "failed requests": "crash-safety",
    "prometheus": "monitoring",
    **dict.fromkeys(["docker", "scrapyd", "kubernetes", "systemd", "memusage"], "deploy"),
    **dict.fromkeys(["backup", "restore", "move a job"], "backup"),
    **dict.fromkeys(["nightly crawl", "recrawl every week", "CloseSpider"], "nightly"),
    **dict.fromkeys(["price changes", "images"], "shop"),
    **dict.fromkeys(["login", "several spiders"], "spiders"),
    **dict.fromkeys(["feed", "kafka", "lpush"], "feed"),
    "upgrade": "upgrade",
    "alerts": "alerts",
}
INPUT = "document.querySelector('.md-search__input')"
FOUND = """[...document.querySelectorAll('.md-search-result__link')]
    .map(link => new URL(link.href)).map(url => url.pathname.slice(1) + url.hash)"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir"]
    subprocess.run([*command, str(path)], cwd=ROOT, check=True, timeout=300)
    return path


class _Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Keep the output of the tests short."""


@pytest.fixture(scope="module")
def address(built: Path) -> Iterator[str]:
    handler = partial(_Handler, directory=str(built))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="module")
def reader(address: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if not CHROMIUM:
        pytest.skip("there is no Chromium here")
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        opened.open(address)
        yield opened


def paste(reader: Browser, text: str, *, releases_key: bool = True) -> None:
    """Copy a text, and paste it into the search, as the keys do; without a release, as a menu."""
    copied = """const area = document.createElement('textarea');
        document.body.append(area); area.value = TEXT; area.select();"""
    reader.run(f"{{{copied.replace('TEXT', json.dumps(text))}}}")
    key = {"type": "keyDown", "modifiers": 2}
    reader.send("Input.dispatchKeyEvent", **key, key="c", code="KeyC", commands=["copy"])
    reader.run("document.querySelector('body > textarea').remove()")
    reader.run(f"{INPUT}.focus()")
    reader.send("Input.dispatchKeyEvent", **key, key="v", code="KeyV", commands=["paste"])
    if releases_key:
        reader.send("Input.dispatchKeyEvent", type="keyUp", key="v", code="KeyV")


def type_in(reader: Browser, text: str) -> None:
    reader.run(f"{INPUT}.focus()")
    reader.send("Input.insertText", text=text)
    reader.run(f"{INPUT}.dispatchEvent(new Event('keyup', {{bubbles: true}}))")


def search(reader: Browser, text: str, enter: Callable[..., None] = paste) -> list[str]:
    """Return the addresses that the search lists, in their order."""
    reader.wait_for(f"Boolean({INPUT})")
    reader.run(f"{INPUT}.value = ''; {INPUT}.dispatchEvent(new Event('keyup', {{bubbles: true}}))")
    reader.wait_for(f"{FOUND}.length === 0")
    enter(reader, text)
    return reader.wait_for(f"(found => found.length && found)({FOUND})")


def test_each_pasted_message_is_one_of_the_page() -> None:
    patterns = [".*".join(map(re.escape, entry.split(GAP))) for entry in entries()]
    for message in PASTED:
        assert any(re.fullmatch(pattern, message) for pattern in patterns), message
    for line in PASTED_LINES:
        message = line.rpartition("INFO: ")[2]
        assert any(text.match(message) for text in lines_of_log().values()), message


def test_the_search_finds_a_pasted_message(reader: Browser, address: str) -> None:
    """Listed are a page, and its sections below it."""
    pasted = PASTED | OF_THE_SERVER
    right = {message: f"troubleshooting/#{heading}" for message, heading in pasted.items()}
    right |= dict.fromkeys(PASTED_LINES, "stats/#lines-in-the-log")
    wrong = {}
    reader.open(address)
    for message, place in right.items():
        sections = [found for found in search(reader, message) if "#" in found]
        places = [found.rpartition(".")[0] or found for found in sections]
        if places[0] != place:
            wrong[message] = sections[:5]
    assert not wrong


def test_a_text_pasted_by_the_mouse_is_searched_for_and_stays_visible(
    reader: Browser, address: str
) -> None:
    reader.open(address)
    message = PASTED_LINES[1]
    assert "stats/#lines-in-the-log.4" in search(
        reader, message, partial(paste, releases_key=False)
    )
    shown = "Object.getOwnPropertyDescriptor(HTMLInputElement.prototype, 'value').get"
    assert reader.run(f"{shown}.call({INPUT})") == message


def test_the_search_finds_a_page(reader: Browser, address: str) -> None:
    reader.open(address)
    first = {words: search(reader, words, type_in)[0] for words in TYPED}
    assert first == {words: f"{page}/" for words, page in TYPED.items()}


def test_the_header_leads_to_the_repository_and_nothing_is_fetched_elsewhere(
    reader: Browser, address: str
) -> None:
    reader.open(address)
    repository = re.search(r"^repo_url: (\S+)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert repository
    link = "document.querySelector('.md-header__source a').href"
    assert reader.wait_for(link) == repository[1]
    loaded = reader.run("performance.getEntriesByType('resource').map(entry => entry.name)")
    assert loaded
    assert not [url for url in loaded if not url.startswith(address)]


def test_no_page_is_wider_than_a_telephone(reader: Browser, address: str, built: Path) -> None:
    width = 400
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    reader.send("Emulation.setDeviceMetricsOverride", **metrics)
    for page in sorted(built.rglob("index.html")):
        reader.open(f"{address}{page.relative_to(built).as_posix()}")
        assert reader.run("document.documentElement.scrollWidth") <= width, page
    reader.send("Emulation.clearDeviceMetricsOverride")


ON_THE_SITE = [path for path in DOCUMENTS if path.name != "SECURITY.md"]  # docs/security.md is


@pytest.mark.parametrize("document", ON_THE_SITE, ids=lambda path: path.name)
def test_each_list_renders_as_a_list(document: Path, built: Path) -> None:
    name = "" if document.name == "README.md" else document.stem.lower()
    page = (built / name / "index.html").read_text("utf-8")
    text = BLOCK.sub("", document.read_text("utf-8"))
    marked = len(re.findall(r"^ *(?:[-*]|\d+\.) ", text, re.MULTILINE))
    article = page.partition("<article")[2].partition("</article>")[0]
    listed = len(re.findall(r"<li[ >]", article))
    if document.name == "api.md":  # its docstrings have lists, too
        assert listed >= marked
    else:
        assert listed == marked
