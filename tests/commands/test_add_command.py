"""`scrapy bloom add`: requests for a running or paused crawl, and what scrapy-redis has left."""

import json
import pickle
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from scrapy import Request

from tests.support import servers
from tests.support.cli import SCRAPY, bloom
from tests.support.crawls import Crawl, spider_with
from tests.support.documents import BLOCK, section
from tests.support.request_queues import Trap
from tests.support.shared_crawls import SharedCrawl
from tests.support.shell import run_in_shell
from tests.support.sites import Site
from tests.support.workspace import start_project

SAFE = {"SCHEDULER": "scrapy_bloom.CrashSafeScheduler"}
ADDED = "/added/"


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
        arguments = ("add", *crawl.place, "--file", "list", "--json")
        ran = list(pool.map(lambda _: bloom(*arguments, cwd=tmp_path), range(2)))
    assert [(each.status, each.json["read"], each.json["skipped"]) for each in ran] == [
        (1, 100, 1)
    ] * 2
    assert sum(each.json["new"] for each in ran) == 100
    assert "1 line is not a URL and was left out; the first: line 101" in ran[0].error
    again = bloom("add", *crawl.place, known, *urls(wide, 1, 100), cwd=tmp_path)
    assert again.out == "1 request was added to the queue\nDuplicates, left out: 2\n"
    twice = bloom("add", *crawl.place, known, "--dont-filter", "--json", cwd=tmp_path).json
    assert (twice["new"], twice["duplicate"], twice["handed_over"]) == (1, 0, False)
    crawl.finish()
    assert added(wide) == paths(*range(101))
    assert wide.hits[recorded] == 2
    assert not crawl.state().workers


def test_into_a_shared_crawl_that_has_ended(wide: Site, tmp_path: Path) -> None:
    crawl = SharedCrawl(wide, tmp_path)
    crawl.finish(crawl.start())
    assert bloom("add", *crawl.place, *urls(wide, *range(5)), cwd=tmp_path).status == 0
    assert crawl.state().pending == 5
    assert not crawl.state().ended_at
    crawl.finish(crawl.start())
    assert added(wide) == paths(*range(5))
    assert crawl.state().ended_at


def test_the_order_and_the_spider_of_what_is_added(wide: Site, tmp_path: Path) -> None:
    crawl = SharedCrawl(wide, tmp_path)
    for worker in crawl.hold(20):
        crawl.interrupt(worker)  # otherwise, a worker may take what is added
    for priority in ("-5", "7"):
        options = ("--priority", priority, "--callback", "parse")
        assert bloom("add", *crawl.place, *urls(wide, int(priority)), *options, cwd=tmp_path)
    first = bloom("queue", *crawl.place, "--next", "1", "--json", cwd=tmp_path).json["next"][0]
    assert (first["url"], first["priority"], first["callback"]) == (*urls(wide, 7), 7, "parse")
    other = bloom("add", *crawl.place, *urls(wide, 1), "--spider", "other", cwd=tmp_path)
    assert "has the queue of the spider links, and this one is 'other'" in other.error
    crawl.finish(crawl.start())
    assert added(wide) == paths(-5, 7)


def test_during_an_outage_of_the_server(
    wide: Site, durable: servers.Server, tmp_path: Path
) -> None:
    crawl = SharedCrawl(wide, tmp_path, server=durable)
    crawl.hold(20)
    (tmp_path / "list").write_text("\n".join(urls(wide, *range(1500))))
    with ThreadPoolExecutor() as pool:
        adding = pool.submit(bloom, "add", *crawl.place, "--file", "list", "--json", cwd=tmp_path)
        servers.wait_for(lambda: crawl.state().pending > 200, lambda: "nothing is added")
        durable.kill()
        durable.start()
        ran = adding.result(servers.LIMIT)
    assert ran.status == 0, ran
    assert ran.json["new"] + ran.json["duplicate"] == 1500
    crawl.finish()
    assert added(wide) == paths(*range(1500))


def test_what_a_server_that_was_rolled_back_has_lost_is_added_again(
    tree: Site, key: str, server: servers.Server, tmp_path: Path
) -> None:
    crawl = SharedCrawl(tree, tmp_path)
    crawl.interrupt(crawl.hold(20, workers=1)[0])
    before = crawl.state().pending

    def give(*numbers: int) -> None:
        assert adding.stdin
        adding.stdin.write("".join(f"{each}\n" for each in urls(tree, *numbers)))
        adding.stdin.flush()
        expected = before + len(numbers) * (numbers[0] // 100 + 1)
        servers.wait_for(lambda: crawl.state().pending == expected, lambda: str(crawl.state()))

    command = [SCRAPY, "bloom", "add", *crawl.place, "--file", "-"]
    with subprocess.Popen(
        command, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as adding:
        give(*range(100))
        saved = {each: server.client.dump(each) for each in server.client.keys(f"*{key}*")}
        give(*range(100, 200))
        for each, value in saved.items():
            server.client.restore(each, 0, value, replace=True)
        assert crawl.state().pending == before + 100
        give(*range(200, 300))
        out, _ = adding.communicate(timeout=servers.LIMIT)
    assert adding.returncode == 0
    assert "300 requests were added" in out
    assert crawl.state().pending == before + 300


# A job.


def test_into_a_paused_job(tree: Site, tmp_path: Path) -> None:
    settings = {**SAFE, "JOBDIR": tmp_path / "job"}
    Crawl.held(tree, 20, tmp_path, settings).interrupt()
    _, known = crawled(tree)
    ran = bloom("add", "job", *urls(tree, 1, 2), known, cwd=tmp_path)
    assert ran.status == 0, ran
    assert "2 requests were handed over to the crawl of job: it queues them within a " in ran.out
    assert "Duplicates, left out: 1" in ran.out
    bloom("add", "job", *urls(tree, 2, 3), cwd=tmp_path)
    assert bloom("queue", "job", "--json", cwd=tmp_path).json["handed_over"] == 4
    refused = bloom("copy", "job", servers.shared("valkey").url, cwd=tmp_path).error
    assert "4 requests that `scrapy bloom add` has handed over" in refused
    crawl = Crawl.finished(tree.url, tmp_path, settings)
    assert added(tree) == paths(1, 2, 3)
    assert not list((tmp_path / "job/requests.added").iterdir())
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
    crawl = Crawl.held(tree, 20, tmp_path, settings)
    with ThreadPoolExecutor() as pool:
        (tmp_path / "list").write_text("\n".join(urls(tree, *range(1500))))
        arguments = ("add", "job", "--file", "list", "--json")
        ran = list(pool.map(lambda _: bloom(*arguments, cwd=tmp_path), range(2)))
    assert all(each.json["handed_over"] for each in ran)
    crawl.wait_until(lambda: not list((tmp_path / "job/requests.added").iterdir()))
    pending = bloom("queue", "job", "--json", cwd=tmp_path).json["pending"]
    assert pending >= 1500
    crawl.kill()
    assert bloom("add", "job", *urls(tree, 1500), cwd=tmp_path).status == 0
    Crawl.finished(tree.url, tmp_path, settings)
    assert added(tree) == paths(*range(1501))


def test_the_callback(tree: Site, tmp_path: Path) -> None:
    """It is a method of the spider; if another spider lacks it, the request is kept."""
    project = start_project(tmp_path / "work")
    (project / "shopping/spiders/shop.py").write_text(
        "import scrapy\nclass Shop(scrapy.Spider):\n    name = 'shop'\n"
    )
    arguments = ("add", "job", "https://a.example", "--spider", "shop", "--callback", "gone")
    ran = bloom(*arguments, cwd=project)
    assert "--callback gone: the spider 'shop' has no such method" in ran.error
    settings = {**SAFE, "JOBDIR": tmp_path / "job"}
    Crawl.finished(tree.url, tmp_path, settings)
    bloom("add", "job", *urls(tree, 1), "--callback", "gone", cwd=tmp_path)
    crawl = Crawl.finished(tree.url, tmp_path, settings)
    (error,) = crawl.our_lines("ERROR")
    assert "A request of the job cannot be deserialized, and stays in " in error
    spider = spider_with(tmp_path, "\nLinkSpider.gone = LinkSpider.parse\n")
    Crawl.finished(tree.url, tmp_path, settings, spider=spider)
    assert added(tree) == paths(1)


def test_a_filter_of_the_project_that_fails(tree: Site, tmp_path: Path) -> None:
    """The crawl ends all the same."""
    settings = {**SAFE, "JOBDIR": tmp_path / "job", "DUPEFILTER_CLASS": None}
    spider = spider_with(
        tmp_path,
        "from scrapy_bloom import BloomDupeFilter\n"
        "class Failing(BloomDupeFilter):\n"
        "    def request_seen(self, request):\n"
        "        if 'added' in request.url: raise ZeroDivisionError('again')\n"
        "        return super().request_seen(request)\n"
        "LinkSpider.custom_settings = {'DUPEFILTER_CLASS': Failing}\n",
    )
    Crawl.finished(tree.url, tmp_path, settings, spider=spider)
    bloom("add", "job", *urls(tree, 1, 2), cwd=tmp_path)
    crawl = Crawl.finished(tree.url, tmp_path, settings, spider=spider)
    assert not added(tree)
    errors = crawl.our_lines("ERROR")
    assert len(errors) == 2
    assert all("The duplicate filter failed on <GET " in each for each in errors)


@pytest.mark.parametrize(
    "contents",
    [
        {"requests": [Request("https://a.example")]},
        {"move": ["in_flight", None, None]},
        {"move": ["pending", "pending", None]},
        {"move": ["failed", "dead", None]},
        {"move": ["failed", "pending", 5]},
    ],
)
def test_a_file_that_is_damaged(contents: object, tree: Site, tmp_path: Path) -> None:
    settings = {**SAFE, "JOBDIR": tmp_path / "job"}
    Crawl.finished(tree.url, tmp_path, settings)
    bloom("add", "job", *urls(tree, 1), cwd=tmp_path)
    (file,) = (tmp_path / "job/requests.added").iterdir()
    file.write_bytes(pickle.dumps(contents))
    crawl = Crawl.finished(tree.url, tmp_path, settings)
    (error,) = crawl.our_lines("ERROR")
    assert "cannot be read, and is not done. The file was renamed to " in error


# What scrapy-redis has left.

NO_START = """
    async def start(self):
        return
        yield
"""
REDIS_SPIDER = f"""
from scrapy_redis.spiders import RedisSpider

Links = LinkSpider
del LinkSpider  # it is not the spider to run

class Shop(RedisSpider, Links):
    name = "shop"
    redis_batch_size = 3
    {NO_START}
"""
PLAIN_SPIDER = f"""
LinkSpider.name = "shop"

class Start:
    {NO_START}

LinkSpider.start = Start.start
"""


def test_the_recipe_to_move_a_redis_spider(
    tree: Site, server: servers.Server, tmp_path: Path
) -> None:
    client, name = server.client, tmp_path.name
    starts, requests, seen = (f"{name}:{each}" for each in ("starts", "requests", "seen"))
    keys = {"SCHEDULER_QUEUE_KEY": requests, "REDIS_START_URLS_KEY": starts}
    theirs = {
        **keys,
        "SCHEDULER": "scrapy_redis.scheduler.Scheduler",
        "SCHEDULER_PERSIST": True,
        "SCHEDULER_DUPEFILTER_KEY": seen,
        "DUPEFILTER_CLASS": "scrapy_redis.dupefilter.RFPDupeFilter",
        "REDIS_URL": server.url,
    }
    client.rpush(starts, tree.url, *urls(tree, *range(5)))
    client.rpush(starts, *(json.dumps({"url": url}) for url in urls(tree, *range(5, 10))))
    spider = spider_with(tmp_path, REDIS_SPIDER)
    crawl = Crawl.held(tree, 20, tmp_path, theirs, spider=spider)
    crawl.interrupt()
    left, queued = client.llen(starts), client.exists(requests)
    assert 0 < left < 11
    assert queued
    assert 20 < tree.total() < 100

    setting, shell = (code for _, code in BLOCK.findall(section("From a RedisSpider")))
    named = {"shop:moved": f"{name}:moved", "shop:dupefilter": seen}
    for written, real in {"redis://localhost:6379/0": server.url, **named}.items():
        setting, shell = setting.replace(written, real), shell.replace(written, real)
    for each, value in keys.items():
        shell = shell.replace("--from-scrapy-redis", f"-s {each}={value} --from-scrapy-redis")
    ran = run_in_shell(shell, tmp_path)
    assert ran.returncode == 0, ran
    assert client.llen(starts) == left
    settings: dict[str, object] = {}
    exec(setting, settings)
    ours = {each: value for each, value in settings.items() if each.isupper()}
    spider = spider_with(tmp_path, PLAIN_SPIDER)
    ours["BLOOM_QUEUE_WHEN_EMPTY"] = "close"
    crawl = Crawl.finished(tree.url, tmp_path, ours, spider=spider)
    assert not crawl.our_lines("WARNING")
    assert added(tree) == paths(*range(10))
    pages = {path: number for path, number in tree.hits.items() if path.startswith("/p/")}
    assert len(pages) == 150
    assert [path for path, number in pages.items() if number > 1] in ([], ["/p/0"])


@pytest.mark.parametrize("kind", ["list", "set", "zset"])
def test_keys_are_drained_but_for_what_cannot_be_read(
    kind: str, server: servers.Server, tmp_path: Path
) -> None:
    requests = [
        Request(f"https://shop.example/{number}", callback=None, priority=number).to_dict()
        for number in range(250)
    ]
    pickles = [pickle.dumps(each) for each in requests]
    pickles[7] = pickle.dumps({"url": Trap(tmp_path / "sprung")})
    pickles[100] = b"no pickle"
    client, key = server.client, f"{tmp_path.name}:requests"
    if kind == "zset":
        client.zadd(key, {each: -number for number, each in enumerate(pickles)})
    else:
        (client.rpush if kind == "list" else client.sadd)(key, *pickles)
    arguments = ("add", server.url, "--key", tmp_path.name, "--spider", "shop")
    source = ("--from-scrapy-redis", server.url, "--drain", "--json")
    names = ("-s", f"SCHEDULER_QUEUE_KEY={key}")
    ran = bloom(*arguments, *source, *names, cwd=tmp_path)
    assert (ran.json["new"], ran.json["skipped"]) == (248, 2)
    assert "2 entries of scrapy-redis could not be read, and stayed there; the first: " in ran.error
    read = {"list": "LRANGE", "set": "SMEMBERS", "zset": "ZRANGE"}
    left = client.execute_command(read[kind], key, *([] if kind == "set" else [0, -1]))
    assert set(left) == {pickles[7], pickles[100]}
    assert not (tmp_path / "sprung").exists()
    again = bloom(*arguments, *source, *names, cwd=tmp_path)
    assert (again.json["new"], again.json["skipped"]) == (0, 2)
    queue = bloom("queue", server.url, "--key", tmp_path.name, "--json", cwd=tmp_path).json
    assert queue["pending"] == 248
    assert queue["next"][0]["priority"] == 249
