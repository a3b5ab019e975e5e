"""The recipes for crawls: their settings and spiders crawl a site."""

import dbm
import io
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from PIL import Image
from scrapy import Request
from scrapy.utils.request import fingerprint

from tests.support import servers, workspace
from tests.support.crawls import SHARED_SPIDER, Crawl, run_script
from tests.support.documents import BLOCK, page, section
from tests.support.jobs import Job
from tests.support.processes import start_scrapy
from tests.support.shell import run_in_shell
from tests.support.sites import LIMIT, ScriptedSite, Site

PAGES = 30  # of the tree
SHARED = ["Set it up", "Two workers with scrapy-redis", "A Redis Cluster"]


@pytest.mark.parametrize("recipe", SHARED)
def test_the_recipes_for_many_crawlers(recipe: str, tree: Site, tmp_path: Path) -> None:
    tree.delay = 0.02
    code = BLOCK.findall(section(recipe))[0]
    settings = code[1].replace("redis://localhost:6379/0", servers.shared("valkey").url)
    settings = settings.replace("redis+cluster://localhost:7000", servers.shared_cluster().url)
    settings = settings.replace("10_000_000_000", "1_000_000")  # 52 GiB are too much here
    workers = []
    for name in "ab":
        (tmp_path / name).mkdir()
        key = f"{tmp_path.name}:%(spider)s"
        (tmp_path / name / "scrapy.cfg").write_text("[settings]\ndefault = settings\n")
        (tmp_path / name / "settings.py").write_text(
            f"{settings}\nBLOOM_REDIS_KEY = {key!r}\nSCHEDULER_QUEUE_KEY = {key + ':queue'!r}\n"
        )
        options = {"DUPEFILTER_CLASS": None}  # that of the recipe
        workers.append(Crawl(tree.url, tmp_path / name, options, spider=SHARED_SPIDER))
    for worker in workers:
        assert worker.finish() == 0, worker.output
        assert not worker.our_lines("WARNING") + worker.our_lines("ERROR")
        assert "bloom/redis/round_trips" in worker.output
    assert len(tree.hits) == PAGES
    # The start page has two addresses.
    assert sum(count - 1 for count in tree.hits.values()) <= 1


LISTS = '<a class="list" href="/lists/1">1</a><a class="list" href="/lists/2">2</a>'


def list_page(number: int, products: int) -> list[bytes]:
    links = [
        f'<a class="product" href="/{number}/{each_number}">x</a>'
        for each_number in range(products)
    ]
    return [(LISTS + "".join(links)).encode()]


@pytest.fixture
def shop() -> Iterator[ScriptedSite]:
    site = ScriptedSite({"/": [LISTS.encode()]})
    for number in (1, 2):
        site.answers[f"/lists/{number}"] = list_page(number, 3)
    yield site
    site.end()


def test_the_recipe_for_nightly_crawls(shop: ScriptedSite, tmp_path: Path) -> None:
    (recipe,) = BLOCK.findall(section("Settings and spider"))
    names: dict[str, object] = {}
    exec(recipe[1], names)
    settings = {key: value for key, value in names.items() if key.isupper()}
    assert len(settings) > 1
    settings["BLOOM_EXPECTED_REQUESTS"] = 1000  # 50 million are too many here
    code = recipe[1].replace("https://shop.example/", shop.url)
    (tmp_path / "spider.py").write_text(code)
    for products in (6, 1, 0):
        if products == 1:
            shop.answers["/lists/2"] = list_page(2, 4)
        shop.hits.clear()
        settings["BLOOM_RUN"] = f"with {products} new products"
        crawl = Crawl.finished(shop.url, tmp_path, settings, spider=tmp_path / "spider.py")
        assert not crawl.our_lines("ERROR")
        assert (shop.hits["/lists/1"], shop.hits["/lists/2"]) == (1, 1)
        assert sum(count for path, count in shop.hits.items() if path[1:2].isdigit()) == products


@pytest.mark.parametrize("shares", [False, True], ids=["JOBDIR", "Redis"])
def test_the_recipe_for_waiting_keeps_what_it_holds_back(
    shares: bool, tmp_path: Path, key: str
) -> None:
    (code,) = [text[1] for text in BLOCK.findall(section("What it does not")) if "429" in text[1]]
    pages = ["/a", "/b", "/c"]
    place: dict[str, object] = {"JOBDIR": "job"}
    if shares:
        place = workspace.in_redis(key, BLOOM_QUEUE_LEASE_SECS=1)
    settings = {
        "SCHEDULER": "scrapy_bloom.CrashSafeScheduler",
        "DOWNLOADER_MIDDLEWARES": '{"waiting.WaitAfter429": 560}',
        **place,
    }
    with ScriptedSite({"/": [tuple(pages)], **{page: [429, 429, ()] for page in pages}}) as site:
        for secs in ("3600", "0.1"):
            (tmp_path / "waiting.py").write_text(code.replace("10", secs))
            crawl = Crawl(site.url, tmp_path, settings)
            if secs == "3600":
                crawl.wait_until(lambda: all(site.hits[page] for page in pages))
                crawl.kill()
        assert crawl.finish() == 0, crawl.output
        assert [site.hits[page] for page in pages] == [3, 3, 3]


def test_the_recipe_for_pages_that_redirect_to_themselves(tmp_path: Path) -> None:
    (code,) = [text[1] for text in BLOCK.findall(section("Does it work")) if "Cookie" in text[1]]
    answers = {"/": [("/a",)], "/a": ["/a", ("/b", "/loop")], "/loop": ["/loop"]}
    with ScriptedSite(answers) as site:
        (tmp_path / "spider.py").write_text(code.replace("https://shop.example/", site.url))
        Crawl.finished(site.url, tmp_path, {"JOBDIR": "job"}, spider=tmp_path / "spider.py")
        assert site.hits == {"/": 1, "/a": 2, "/b": 1, "/loop": 2}


def test_the_recipe_for_two_lists_ends_with_what_is_in_both(tmp_path: Path) -> None:
    """Also with a false-positive rate of one half."""
    a, b = workspace.urls(range(2000)), workspace.urls(range(1900, 4000))
    workspace.write_urls(tmp_path / "a.txt", a)
    workspace.write_urls(tmp_path / "b.txt", b)
    for _, code in BLOCK.findall(section("Two lists")):
        worst = code.replace("=1e-9", "=0.9").replace("=100M", "=2000")
        assert run_in_shell(worst, tmp_path).returncode == 0
    answers = (tmp_path / "in-both.txt").read_text().split()
    assert set(a) & set(b) < set(answers)
    assert (tmp_path / "exactly.txt").read_text().split() == sorted(set(a) & set(b))


class MembersOnly(BaseHTTPRequestHandler):
    """Twenty pages, in place of which the login is shown without the cookie that it sets."""

    links = "".join(f'<a href="/p/{number}">x</a>' for number in range(20)).encode()

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        is_login = self.path == "/login"
        is_member = is_login or "member=1" in self.headers.get("Cookie", "")
        self.server.hit(self.path if is_member else "log in first")
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        if is_login:
            self.send_header("Set-Cookie", "member=1")
        self.end_headers()
        self.wfile.write(self.links if is_member else b"log in first")

    do_POST = do_GET  # noqa: N815 - http.server's name

    def log_message(self, *_: object) -> None:
        """Keep the output of the tests short."""


def test_the_recipe_to_log_in(tmp_path: Path) -> None:
    """A worker joins, and a job is resumed."""
    (recipe,) = BLOCK.findall(section("Login in each process"))
    with Site(MembersOnly) as site:
        code = recipe[1].replace("https://shop.example/login", f"{site.url}login")
        shared = workspace.in_redis(tmp_path.name)
        for directory, place in (("shared", shared), ("job", {"JOBDIR": "job"})):
            site.forget()
            (tmp_path / directory).mkdir()
            (tmp_path / directory / "log_in.py").write_text(code)
            settings = {
                "SCHEDULER": "scrapy_bloom.CrashSafeScheduler",
                "DOWNLOADER_MIDDLEWARES": '{"log_in.LogIn": 650}',
                "CONCURRENT_REQUESTS": 2,
                **place,
            }
            first = Crawl.held(site, 8, tmp_path / directory, settings)
            if directory == "job":
                assert first.interrupt() == 0
            second = Crawl(site.url, tmp_path / directory, settings)
            if directory == "shared":  # the login of the second, and two pages of the first
                second.wait_until(lambda: site.under_way == 3)
                site.release()
            assert [crawl.finish() for crawl in (first, second)] == [0, 0], second.output
            assert site.hits["/login"] == 2
            assert site.hits["log in first"] == 0
            assert len([path for path in site.hits if path.startswith("/p/")]) == 20


def test_the_recipe_to_import_the_database_of_scrapy_deltafetch(tmp_path: Path) -> None:
    """It stores the fingerprints of Scrapy, and a time, with dbm."""
    text = section("From scrapy-deltafetch")
    (recipe,) = BLOCK.findall(text)
    crawled, other = workspace.urls(range(20)), workspace.urls(range(20, 40))
    (tmp_path / ".scrapy/deltafetch").mkdir(parents=True)
    with dbm.open(f"{tmp_path}/.scrapy/deltafetch/shop.db", "c") as database:
        for url in crawled:
            database[fingerprint(Request(url))] = b"1700000000.0"
    assert run_script(recipe[1], cwd=tmp_path).returncode == 0
    (command,) = re.findall(r"^`(scrapy bloom .+)`$", text, re.MULTILINE)
    assert run_in_shell(command, tmp_path).returncode == 0
    workspace.write_urls(tmp_path / "all.txt", [*crawled, *other])
    checked = run_in_shell("scrapy bloom check jobs/shop all.txt", tmp_path)
    assert checked.stdout.split() == other


# Which start requests are crawled again: each cell of the table is two crawls.

STARTING = """
    from pathlib import Path
    import scrapy

    class Shop(scrapy.Spider):
        name = "shop"

        async def start(self):
            with Path(__file__).with_name("started").open("a") as log:
                log.write("x")
            yield scrapy.Request(self.url, dont_filter=DONT_FILTER)

        def parse(self, response):
            yield from response.follow_all(css="a")
"""
RESTARTS = ("after a pause", "after a kill", "after the end", "new `BLOOM_RUN`")
SCHEDULERS = {
    "Scrapy's": "scrapy.core.scheduler.Scheduler",
    "CrashSafeScheduler": "scrapy_bloom.CrashSafeScheduler",
}


def start_table() -> dict[tuple[str, str], tuple[str, list[str]]]:
    """Return where start() is executed, and the cells, by the first and the third column."""
    lines = [line for line in section("Start requests").splitlines() if line.startswith("|")]
    (_, _, _, *columns), _, *rows = (line.strip("| ").split(" | ") for line in lines)
    assert tuple(columns) == RESTARTS
    table, first = {}, ["", ""]
    for row in rows:
        cells = row if len(row) == 7 else [*first, *row[-5:]]
        first = cells[:2]
        table[cells[0], cells[2]] = (cells[1], cells[3:])
    return table


@pytest.mark.parametrize("row", start_table(), ids=" ".join)
def test_which_start_requests_are_crawled_again(row: tuple[str, str], tmp_path: Path) -> None:
    scheduler, place = row[0].replace("`", "").split(", ")
    executed, cells = start_table()[row]
    links = tuple(f"/page/{number}" for number in range(12))
    code = STARTING.replace("DONT_FILTER", str("dont_filter" in row[1]))
    for restart, cell in zip(RESTARTS, cells, strict=True):
        (directory := tmp_path / restart.replace("`", "")).mkdir()
        with ScriptedSite({"/": [links]}) as site:
            settings = {"SCHEDULER": SCHEDULERS[scheduler], "CONCURRENT_REQUESTS": 2}
            job = Job(place, directory, site, code, **settings)
            if scheduler == "Scrapy's":
                job.settings.pop("BLOOM_SHARED_LIMITS", None)
            if cell == "refused":
                named = {**job.settings, "BLOOM_RUN": "new"}
                error = Crawl(site.url, directory, named, spider=job.spider).refusal()
                assert "under this scheduler each process is a run" in error
                continue
            if restart.startswith("after a "):
                (crawl,) = job.hold(4)
                (job.kill if restart == "after a kill" else job.interrupt)(crawl)
            else:
                job.crawl()
            job.crawl("new" if restart.startswith("new") else "")
            assert ("/" in site.hits) == (cell == "again"), restart
        begun = len((directory / "started").read_text())
        assert begun == (1 if executed == "once in each run" and cell == "no" else 2)


@pytest.mark.parametrize("removes_queue", [False, True])
def test_the_recipe_for_runs_that_end_early(removes_queue: bool, tmp_path: Path) -> None:
    with ScriptedSite({"/": [tuple(f"/page/{number}" for number in range(12))]}) as site:
        code = STARTING.replace("DONT_FILTER", "True")
        job = Job("JOBDIR", tmp_path, site, code, CLOSESPIDER_PAGECOUNT=5, CONCURRENT_REQUESTS=1)
        job.finish(job.start("first"), "closespider_pagecount")
        if removes_queue:
            assert job.bloom("reset", "--queue", "--yes").status == 0
        site.forget()
        (crawl,) = job.start("second")
        assert crawl.finish() == 0
        assert (site.hits == {"/": 1}) == removes_queue
        assert ("/" in site.hits) == removes_queue  # otherwise, the pending requests come first


# A shop from the beginning.

# Python may keep the bytecode of a module that changes twice within a second.
AHEAD = """
import time
from pathlib import Path

now, nights = time.time, int(Path("nights").read_text())
time.time = lambda: now() + nights * 86_400
"""


def test_the_shop_of_nine_nights(tmp_path: Path) -> None:
    """In the second, there is a new product. Images are downloaded once."""
    code = [text for _, text in BLOCK.findall(page("shop.md"))]
    code += [BLOCK.findall(section("Login in each process"))[0][1]]
    files = [
        re.findall(r"^# (shopping/\S+)$|^# myproject/(\S+)$", text, re.MULTILINE) for text in code
    ]
    (tmp_path / "shopping/spiders").mkdir(parents=True)
    (tmp_path / "shopping/__init__.py").write_text(AHEAD)
    (tmp_path / "scrapy.cfg").write_text("[settings]\ndefault = shopping.settings\n")
    Image.new("RGB", (8, 8)).save(image := io.BytesIO(), "PNG")
    product = b'<p class="price">9</p><img class="product" src="/image"><a href="/list/1">x</a>'
    with ScriptedSite({"/": [("/list/1",)], "/image": [image.getvalue()]}) as site:
        for (names,), text in zip(files, code, strict=True):
            path = tmp_path / (names[0] or f"shopping/{names[1]}")
            path.write_text(text.replace("https://shop.example/", site.url))
        for nights, products in {0: "ab", 1: "c", 2: "", 7: "ab", 8: "c"}.items():
            known = "ab" if nights == 0 else "abc"
            site.answers["/list/1"] = [tuple(f"/product/{name}" for name in known)]
            site.answers |= {f"/product/{name}": [product] for name in known}
            (tmp_path / "nights").write_text(str(nights))
            site.forget()
            command = ["crawl", "shop", "-s", f"BLOOM_RUN={nights}"]
            with (log := tmp_path / f"{nights}.log").open("wb") as file:
                night = start_scrapy(command, cwd=tmp_path, out=file, err=file)
            assert night.wait(LIMIT) == 0, log.read_text()
            assert "ERROR" not in log.read_text()
            pages = ["/", "/list/1", "/login", *(f"/product/{name}" for name in products)]
            expected = dict.fromkeys([*pages, *["/image"][nights:]], 1)
            assert site.hits == expected, log.read_text()
    with closing(sqlite3.connect(tmp_path / "prices.sqlite")) as database:
        (prices,) = database.execute("SELECT count(*) FROM prices WHERE price = '9'").fetchone()
    assert prices == 3  # on one day of the clock that only the filter does not follow
