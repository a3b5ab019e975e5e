"""`scrapy bloom add`: requests for a running or paused crawl, and what scrapy-redis has left."""

import json
import os
import pickle
import re
import sqlite3
import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from scrapy import Request

from scrapy_bloom.queues import inbox
from scrapy_bloom.queues.store import State
from tests.support import servers
from tests.support.cli import SCRAPY, bloom
from tests.support.crawls import RULES_SPIDER, SPIDER, Crawl, spider_with
from tests.support.documents import BLOCK, section
from tests.support.jobs import PLACES, Job
from tests.support.shared_crawls import SharedCrawl
from tests.support.shell import run_in_shell
from tests.support.sites import ScriptedSite, Site
from tests.support.workspace import start_project

PAGES = 60  # of the tree
SAFE = {"SCHEDULER": "scrapy_bloom.CrashSafeScheduler"}
ADDED = "/added/"
ADDABLE = {
    "url": "http://127.0.0.1:9/added/1",
    "callback": None,
    "priority": 0,
    "dont_filter": False,
}


def urls(site: Site, *numbers: int) -> list[str]:
    return [f"{site.url.rstrip('/')}{ADDED}{number}" for number in numbers]


def crawled(site: Site) -> tuple[str, str]:
    """The path of a page that was crawled, and the URL that led to it."""
    path = next(path for path in site.hits if path not in {"/p/0", "/"})
    return path, f"{site.url.rstrip('/')}{path}?a=2&b=1"


def added(site: Site) -> dict[str, int]:
    return {path: number for path, number in site.hits.items() if path.startswith(ADDED)}


def paths(*numbers: int) -> dict[str, int]:
    return {f"{ADDED}{number}": 1 for number in numbers}


def test_into_a_shared_crawl_that_runs_twice_at_once(wide: Site, tmp_path: Path) -> None:
    crawl = SharedCrawl(wide, tmp_path)
    crawl.hold(20)
    recorded, known = crawled(wide)
    (tmp_path / "list").write_text("\n".join([*urls(wide, *range(100)), "no URL"]))
    with ThreadPoolExecutor() as pool:
        arguments = ("add", *crawl.place, "list", "--json")
        ran = list(pool.map(lambda _: bloom(*arguments, cwd=tmp_path), range(2)))
    assert [(entry.status, entry.json["read"], entry.json["skipped"]) for entry in ran] == [
        (1, 100, 1)
    ] * 2
    assert sum(entry.json["new"] for entry in ran) == 100
    assert "1 line was not valid; the first: line 101" in ran[0].error
    again = bloom("add", *crawl.place, known, *urls(wide, 1, 100), cwd=tmp_path)
    assert again.out == "1 request was added to the queue\nDuplicates, left out: 2\n"
    twice = bloom("add", *crawl.place, known, "--dont-filter", "--json", cwd=tmp_path).json
    assert (twice["new"], twice["duplicate"], twice["handed_over"]) == (1, 0, False)
    crawl.finish()
    assert added(wide) == paths(*range(101))
    assert wide.hits[recorded] == 2
    assert not crawl.state().workers


def test_the_order_and_the_spider_of_what_is_added(wide: Site, tmp_path: Path) -> None:
    crawl = SharedCrawl(wide, tmp_path)
    for worker in crawl.hold(20):
        crawl.interrupt(worker)  # otherwise, a worker may take what is added
    for priority in ("-5", "7"):
        options = ("--priority", priority, "--callback", "parse")
        assert bloom("add", *crawl.place, *urls(wide, int(priority)), *options, cwd=tmp_path)
    first = bloom("queue", *crawl.place, "--next", "1", "--json", cwd=tmp_path).json["next"][0]
    assert (first["url"], first["priority"], first["method"]) == (*urls(wide, 7), 7, "GET")
    other = bloom("add", *crawl.place, *urls(wide, 1), "--spider", "other", cwd=tmp_path)
    assert "belongs to spider 'links', but this crawl runs 'other'" in other.error
    crawl.finish(crawl.start())
    assert added(wide) == paths(-5, 7)


def test_during_an_outage_of_the_server(
    wide: Site, durable: servers.Server, tmp_path: Path
) -> None:
    crawl = SharedCrawl(wide, tmp_path, server=durable)
    crawl.hold(20)
    (tmp_path / "list").write_text("\n".join(urls(wide, *range(600))))
    with ThreadPoolExecutor() as pool:
        adding = pool.submit(bloom, "add", *crawl.place, "list", "--json", cwd=tmp_path)
        servers.wait_for(lambda: crawl.count() > 200, lambda: "nothing is added")
        durable.kill()
        durable.start()
        ran = adding.result(servers.LIMIT)
    assert ran.status == 0, ran
    assert ran.json["new"] + ran.json["duplicate"] == 600
    crawl.finish()
    assert added(wide) == paths(*range(600))


def test_what_a_server_that_was_rolled_back_has_lost_is_added_again(
    tree: Site, key: str, server: servers.Server, tmp_path: Path
) -> None:
    crawl = SharedCrawl(tree, tmp_path)
    crawl.interrupt(crawl.hold(20, workers=1)[0])
    before = crawl.count()

    def give(*numbers: int) -> None:
        assert adding.stdin
        adding.stdin.write("".join(f"{url}\n" for url in urls(tree, *numbers)))
        adding.stdin.flush()
        expected = before + len(numbers) * (numbers[0] // 100 + 1)
        servers.wait_for(lambda: crawl.count() == expected, lambda: str(crawl.state()))

    command = [SCRAPY, "bloom", "add", *crawl.place, "-"]
    with subprocess.Popen(
        command, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as adding:
        give(*range(100))
        saved = {name: server.client.dump(name) for name in server.client.keys(f"*{key}*")}
        give(*range(100, 200))
        server.client.delete(*server.client.keys(f"*{key}*"))
        for entry, value in saved.items():
            server.client.restore(entry, 0, value)
        assert crawl.count() == before + 100
        give(*range(200, 300))
        out, _ = adding.communicate(timeout=servers.LIMIT)
    assert adding.returncode == 0
    assert "300 requests were added" in out
    assert crawl.count() == before + 300


def test_other_programs_add_requests_as_the_document_shows(
    key: str, server: servers.Server, tmp_path: Path
) -> None:
    """By a service that reads a named pipe, and by a function."""
    unit, code = (block for _, block in BLOCK.findall(section("add"))[1:3])
    place, pipe = f"{server.url}#{key}", tmp_path / "urls"
    assert bloom("add", place, "https://a.test/1", "--spider", "shop", cwd=tmp_path).status == 0
    requests = [{"url": f"https://a.test/{number}", "priority": 1} for number in range(3)]
    (tmp_path / "program.py").write_text(f"{code}\nprint(add({place!r}, {requests}))")
    assert run_in_shell("python program.py", tmp_path).stdout == "2\n"
    os.mkfifo(pipe)
    (command,) = re.findall("^ExecStart=/bin/sh -c '(.*)'$", unit, re.MULTILINE)
    command = command.replace("redis#shop:bloom", place).replace("/run/shop/urls", str(pipe))
    env = {**os.environ, "PATH": f"{SCRAPY.parent}{os.pathsep}{os.environ['PATH']}"}
    with subprocess.Popen(["sh", "-c", command], cwd=tmp_path, env=env) as service:
        for number in (3, 4):  # two programs, one after the other
            pipe.write_text(f"https://a.test/{number}\n")

            def pending(number: int = number) -> bool:
                queue = bloom("queue", place, "--json", cwd=tmp_path).json
                return bool(queue["pending"] == number + 1)

            servers.wait_for(pending, lambda: "the service adds nothing")
        service.terminate()


# A job.


def test_into_a_paused_job(tree: Site, tmp_path: Path) -> None:
    settings = {**SAFE, "JOBDIR": tmp_path / "job"}
    Crawl.held(tree, 10, tmp_path, settings).interrupt()
    _, known = crawled(tree)
    ran = bloom("add", "job", *urls(tree, 1, 2), known, cwd=tmp_path)
    assert ran.status == 0, ran
    assert "2 requests were handed over to job\n" in ran.out
    assert "Duplicates, left out: 1" in ran.out
    bloom("add", "job", *urls(tree, 2, 3), cwd=tmp_path)
    assert bloom("queue", "job", "--json", cwd=tmp_path).json["handed_over"] == 4
    refused = bloom("copy", "job", servers.shared("valkey").url, cwd=tmp_path).error
    assert "4 requests that `scrapy bloom add` has handed over" in refused
    crawl = Crawl.finished(tree.url, tmp_path, settings)
    assert added(tree) == paths(1, 2, 3)
    assert not inbox.read(tmp_path / "job")
    assert crawl.our_lines("INFO")
    assert not crawl.our_lines("ERROR")
    # Of a crawl that is over, too; the job's own pages are not crawled again.
    tree.hits.clear()
    bloom("add", "job", *urls(tree, 4), known, "--dont-filter", cwd=tmp_path)
    Crawl.finished(tree.url, tmp_path, settings)
    assert added(tree) == paths(4)
    assert sum(tree.hits.values()) <= 3


def test_into_a_running_job_twice_at_once_and_killed(tree: Site, tmp_path: Path) -> None:
    settings = {**SAFE, "JOBDIR": tmp_path / "job"}
    crawl = Crawl.held(tree, 20, tmp_path, settings)  # with as many in flight as may be
    with ThreadPoolExecutor() as pool:
        (tmp_path / "list").write_text("\n".join(urls(tree, *range(300))))
        arguments = ("add", "job", "list", "--json")
        ran = list(pool.map(lambda _: bloom(*arguments, cwd=tmp_path), range(2)))
    assert all(entry.json["handed_over"] for entry in ran)
    crawl.wait_until(lambda: not inbox.read(tmp_path / "job"))
    pending = bloom("queue", "job", "--json", cwd=tmp_path).json["pending"]
    assert pending >= 300
    crawl.kill()
    assert bloom("add", "job", *urls(tree, 300), cwd=tmp_path).status == 0
    Crawl.finished(tree.url, tmp_path, settings)
    assert added(tree) == paths(*range(301))


def test_the_callback(tree: Site, tmp_path: Path) -> None:
    """It is a method of the spider; if another spider lacks it, the request is kept."""
    project = start_project(tmp_path / "work")
    (project / "shopping/spiders/shop.py").write_text(
        "import scrapy\nclass Shop(scrapy.Spider):\n    name = 'shop'\n"
    )
    settings = {**SAFE, "JOBDIR": tmp_path / "job"}
    Crawl.finished(tree.url, tmp_path, settings)
    arguments = ("add", tmp_path / "job", *urls(tree, 1), "--callback", "gone")
    ran = bloom(*arguments, "--spider", "shop", cwd=project)
    assert ran.status == 2
    assert "--callback gone: the spider 'shop' has no such method" in ran.err
    assert bloom(*arguments, cwd=project).status == 0
    crawl = Crawl.finished(tree.url, tmp_path, settings)
    (error,) = crawl.our_lines("ERROR")
    assert "A request of the job cannot be deserialized, and stays in " in error
    spider = spider_with(tmp_path, "\nLinkSpider.gone = LinkSpider.parse\n")
    Crawl.finished(tree.url, tmp_path, settings, spider=spider)
    assert added(tree) == paths(1)


POSTING = """
    from pathlib import Path
    import scrapy

    class Shop(scrapy.Spider):
        name = "shop"

        async def start(self):
            yield scrapy.Request(self.url)

        def parse(self, response):
            pass

        def parse_found(self, response, page):
            request = response.request
            with Path(__file__).with_name("found").open("a") as log:
                log.write(f"{request.method} {request.body} {request.headers['X-A']} {page} "
                          f"{request.meta['a']}\\n")
"""


@pytest.mark.parametrize("where", PLACES)
def test_a_list_of_requests_with_all_their_fields(where: str, tmp_path: Path) -> None:
    with ScriptedSite({}) as site:
        job = Job(where, tmp_path, site, POSTING)
        job.crawl()
        line = {
            "url": f"{site.url}search",
            "method": "POST",
            "body": "q=1",
            "headers": {"X-A": "b"},
            "meta": {"a": [1]},
            "cb_kwargs": {"page": 2},
            "callback": "parse_found",
            "priority": 5,
        }
        lines = [line, line, {**line, "body": "q=2"}, {**line, "dont_filter": True}, {"url": 1}]
        (tmp_path / "list.jl").write_text("\n".join(map(json.dumps, lines)))
        ran = job.bloom("add", "list.jl")
        assert "1 line was not valid; the first: line 5" in ran.error
        assert job.bloom("queue", "--json").json["handed_over" if where == "JOBDIR" else "pending"]
        job.crawl()
        found = (tmp_path / "found").read_text().splitlines()
        first = "POST b'q=1' b'b' 2 [1]"
        assert sorted(found) == [first, first, "POST b'q=2' b'b' 2 [1]"]


GOOD = {**ADDABLE, "method": "GET", "body": "", "headers": {}, "meta": {}, "cb_kwargs": {}}
DAMAGED: list[Any] = [
    *([*move] for move in ((State.IN_FLIGHT, None, None), ("?", None, None), (99, None, None), ())),
    *([State.FAILED, to, slot] for to, slot in ((State.DEAD, None), (State.PENDING, 5))),
    [State.PENDING, State.PENDING, None],
    {**GOOD, "priority": 1.5},
    {**GOOD, "callback": ["parse"]},
    {},
    5,
    None,
]


def test_messages_that_are_damaged(tree: Site, tmp_path: Path) -> None:
    """They are removed, with one line, and the crawl ends. Nothing in them is done."""
    settings = {**SAFE, "JOBDIR": tmp_path / "job"}
    Crawl.finished(tree.url, tmp_path, settings)
    bloom("add", "job", *urls(tree, 1), cwd=tmp_path)
    texts = [*map(json.dumps, DAMAGED), "", "[" * 100_000, "9" * 5000]
    data = [*map(str.encode, texts), pickle.dumps(GOOD), b"\xff", "text", 1e9, None]
    with closing(sqlite3.connect(tmp_path / "job/inbox.sqlite")) as db, db:
        for contents in data:
            values = isinstance(contents, bytes), contents
            db.execute("INSERT INTO messages (is_request, contents) VALUES (?, ?)", values)
    crawl = Crawl.finished(tree.url, tmp_path, settings)
    (error,) = crawl.our_lines("ERROR")
    assert f"is not done: {len(data)} messages cannot be read; run the command" in error
    assert "Traceback" not in crawl.output
    assert added(tree) == paths(1)
    assert not inbox.read(tmp_path / "job")


@pytest.mark.parametrize("kind", ["a link", "a pipe", "foreign", "cut off", "a journal"])
def test_an_inbox_that_is_none(kind: str, tree: Site, tmp_path: Path) -> None:
    """The crawl goes on without it; commands refuse it."""
    settings = {**SAFE, "JOBDIR": tmp_path / "job"}
    Crawl.held(tree, 10, tmp_path, settings).interrupt()
    bloom("add", "job", *urls(tree, 1), cwd=tmp_path)
    file, other = tmp_path / "job/inbox.sqlite", tmp_path / "other"
    if kind in ("a link", "a pipe"):
        file.rename(other)
    if kind == "a link":
        file.symlink_to(other)
    elif kind == "a pipe":
        os.mkfifo(file)
    elif kind == "cut off":
        os.truncate(file, 4096)
    elif kind == "foreign":
        with closing(sqlite3.connect(file)) as db, db:
            db.execute("CREATE TRIGGER t AFTER DELETE ON messages BEGIN SELECT 1; END")
    else:
        file.with_name("inbox.sqlite-journal").write_bytes(b"journal")
    before = other.exists() and other.read_bytes()
    commands = ["queue job", f"add job {urls(tree, 2)[0]}", "copy job copy"]
    for command in [*commands, "queue job --drop-host 127.0.0.1 --yes"]:
        ran = bloom(*command.split(), cwd=tmp_path)
        assert "inbox.sqlite" in ran.error, command
    crawl = Crawl.finished(tree.url, tmp_path, settings)
    (error,) = crawl.our_lines("ERROR")
    assert "What commands want from this crawl is not done: " in error
    assert not added(tree)
    assert len(tree.hits) == PAGES
    assert before == (other.exists() and other.read_bytes())
    assert bloom("reset", "job", "--force", "--yes", cwd=tmp_path).status == 0
    assert not os.path.lexists(file)


def test_nothing_but_the_values_of_a_command_is_handed_over(tree: Site, tmp_path: Path) -> None:
    """A message that somebody has planted cannot name a class."""
    settings = {**SAFE, "JOBDIR": tmp_path / "job"}
    (tmp_path / "planted.py").write_text(f"open({str(tmp_path / 'sprung')!r}, 'w')")
    Crawl.finished(tree.url, tmp_path, settings)
    bloom("add", "job", *urls(tree, 1), cwd=tmp_path)
    with closing(sqlite3.connect(tmp_path / "job/inbox.sqlite")) as db, db:
        ((contents,),) = db.execute("SELECT contents FROM messages")
        request = {**json.loads(contents), "_class": "planted.Request"}
        db.execute("UPDATE messages SET contents = ?", (json.dumps(request).encode(),))
    crawl = Crawl.finished(tree.url, tmp_path, settings)
    assert not crawl.our_lines("ERROR")
    assert added(tree) == paths(1)
    assert not (tmp_path / "sprung").exists()


# What scrapy-redis has left.

NO_START = """
    async def start(self):
        return
        yield
"""
REDIS_SPIDER = f"""
from scrapy_redis.spiders import RedisCrawlSpider, RedisSpider

Links = LinkSpider
del LinkSpider  # it is not the spider to run

class Shop(RedisCrawlSpider if hasattr(Links, "rules") else RedisSpider, Links):
    name = "shop"
    redis_batch_size = 3
    {NO_START}
"""
PLAIN_SPIDER = f"""
LinkSpider.name = "shop"

class Start:
    {NO_START}

LinkSpider.start = Start.start
LinkSpider.parse_page = lambda self, response: None  # moved link texts are plain texts
"""


def recipe(url: str, name: str) -> tuple[str, str]:
    """The settings and the commands of the recipe, for keys that begin with a name."""
    setting, shell = (code for _, code in BLOCK.findall(section("From a RedisSpider")))
    named = {"shop:dupefilter": f"{name}:seen", "shop:start_urls": f"{name}:starts"}
    named |= {f"shop:{each_name}": f"{name}:{each_name}" for each_name in ("moved", "requests")}
    for written, real in {"redis://localhost:6379/0": url, **named}.items():
        setting, shell = setting.replace(written, real), shell.replace(written, real)
    return setting, shell


def test_the_recipe_imports_nothing_if_a_request_stays_behind(
    server: servers.Server, tmp_path: Path
) -> None:
    """Otherwise, that page would be recorded, and never crawled."""
    client, name = server.client, tmp_path.name
    request = Request("https://shop.example/1", method="POST", headers={"A": "1"}, body="b")
    good, bad = (pickle.dumps({**request.to_dict(), "meta": meta}) for meta in ({}, {"a": b""}))
    client.zadd(f"{name}:requests", {good: 0, bad: 0})
    client.sadd(f"{name}:seen", "1" * 40, "2" * 40)
    _, shell = recipe(server.url, name)
    ran = run_in_shell(shell, tmp_path)
    assert ran.returncode == 1
    assert "Object of type bytes is not JSON serializable" in ran.stderr
    assert not client.exists(f"{name}:moved")
    client.zrem(f"{name}:requests", bad)
    assert run_in_shell(shell, tmp_path).returncode == 0
    found = bloom("info", f"{server.url}#{name}:moved", "--json", cwd=tmp_path).json
    assert (found["recorded"], found["queue"]["pending"]) == (3, 1)


@pytest.mark.parametrize("kind", [SPIDER, RULES_SPIDER], ids=["RedisSpider", "RedisCrawlSpider"])
def test_the_recipe_to_move_a_redis_spider(
    kind: Path, tree: Site, server: servers.Server, tmp_path: Path
) -> None:
    client, name = server.client, tmp_path.name
    starts, requests, seen = (f"{name}:{each_name}" for each_name in ("starts", "requests", "seen"))
    theirs = {
        "SCHEDULER_QUEUE_KEY": requests,
        "REDIS_START_URLS_KEY": starts,
        "SCHEDULER": "scrapy_redis.scheduler.Scheduler",
        "SCHEDULER_PERSIST": True,
        "SCHEDULER_DUPEFILTER_KEY": seen,
        "DUPEFILTER_CLASS": "scrapy_redis.dupefilter.RFPDupeFilter",
        "REDIS_URL": server.url,
    }
    client.rpush(starts, tree.url, *urls(tree, *range(5)))
    client.rpush(starts, *(json.dumps({"url": url}) for url in urls(tree, *range(5, 10))))
    spider = spider_with(tmp_path, REDIS_SPIDER, kind)
    crawl = Crawl.held(tree, 20, tmp_path, theirs, spider=spider)
    crawl.interrupt()
    left, queued = client.llen(starts), client.exists(requests)
    assert 0 < left < 11
    assert queued
    assert 20 < tree.total() < PAGES

    setting, shell = recipe(server.url, name)
    ran = run_in_shell(shell, tmp_path)
    assert ran.returncode == 0, ran
    assert client.llen(starts) == left
    settings: dict[str, object] = {}
    exec(setting, settings)
    ours = {
        each_setting: value for each_setting, value in settings.items() if each_setting.isupper()
    }
    spider = spider_with(tmp_path, PLAIN_SPIDER, kind)
    ours["BLOOM_QUEUE_WHEN_EMPTY"] = "close"
    crawl = Crawl.finished(tree.url, tmp_path, ours, spider=spider)
    assert not crawl.our_lines("WARNING")
    assert "spider_exceptions" not in crawl.output
    assert added(tree) == paths(*range(10))
    pages = {path: number for path, number in tree.hits.items() if path.startswith("/p/")}
    assert len(pages) == PAGES
    assert [path for path, number in pages.items() if number > 1] in ([], ["/p/0"])
