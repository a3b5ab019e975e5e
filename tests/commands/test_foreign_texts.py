"""Texts from files, lists and Redis cannot steer the terminal, or forge lines of the log."""

import json
import time
from pathlib import Path

import pytest

from scrapy_bloom.queues.serialized import serialized
from scrapy_bloom.queues.store import Entered, Row, State, packed_order
from scrapy_bloom.text import is_control
from tests.support import servers
from tests.support.cli import at_a_terminal, bloom
from tests.support.request_queues import InRedis, enter, fill_shared
from tests.support.shared_crawls import SharedCrawl, wide_site
from tests.support.workspace import fingerprints, make_filter, shared_filter, urls, write_urls

# A line of its own, ESC, C1's CSI, an override of the direction, a separator of lines.
EVIL = "a\nERROR: forged\x1b[2J\x9b31m\u202e\u2028\rz"
ESCAPED = r"a\nERROR: forged\x1b[2J\x9b31m\u202e\u2028\rz"
PLAIN = "éש中🕷"  # as it is


def controls(text: str) -> set[str]:
    return {char for char in text if is_control(char)} - {"\n"}


@pytest.mark.parametrize("where", ["file", "redis"])
def test_spider_and_fingerprinter(where: str, server: servers.Server, tmp_path: Path) -> None:
    place: tuple[str, ...] = ("filter",)
    made_by = {"spider": EVIL + PLAIN, "fingerprinter": EVIL}
    if where == "file":
        make_filter(tmp_path / "filter", fingerprints(urls(range(3))), spider=made_by["spider"])
        place = ("filter",)
    else:
        shared_filter(server, "key", fingerprints(urls(range(3))), **made_by)
        place = (f"{server.url}#key",)
    ran = bloom("info", *place, cwd=tmp_path)
    assert ran.status == 0
    assert not controls(ran.out + ran.err)
    assert f"spider:          {ESCAPED}{PLAIN}\n" in ran.out
    as_json = bloom("info", *place, "--json", cwd=tmp_path)
    assert not controls(as_json.out)
    assert as_json.json["spider"] == EVIL + PLAIN  # a program gets it as it is
    if where == "redis":
        error = bloom("check", *place, "-", cwd=tmp_path, stdin=urls([1])[0]).error
        assert not controls(error)
        assert f"REQUEST_FINGERPRINTER_CLASS = '{ESCAPED}'" in error


def test_names_of_workers(tmp_path: Path) -> None:
    """In `info`, and in the log of a crawl that finds the worker dead."""
    site = wide_site()
    crawl = SharedCrawl(site, tmp_path)
    (worker,) = crawl.hold(20, workers=1)
    dead = "dead".ljust(16, "0")
    alive_until = int(1000 * (time.time() + 50))
    fields = {dead: alive_until, f"{dead}:name": EVIL + PLAIN}
    crawl.server.client.hset(crawl.keys["workers"], mapping=fields)
    ran = bloom("info", f"{crawl.server.url}#{crawl.key}", cwd=tmp_path)
    assert not controls(ran.out)
    assert f"\n{ESCAPED}{PLAIN} " in ran.out
    metrics = bloom(
        "info", f"{crawl.server.url}#{crawl.key}", "--format", "prometheus", cwd=tmp_path
    )
    assert not controls(metrics.out)
    assert f'worker="{ESCAPED}{PLAIN}"'.replace("\\", "\\\\") in metrics.out
    crawl.server.client.hset(crawl.keys["workers"], dead, 1)
    crawl.server.client.hdel(crawl.key, "look")
    crawl.finish()
    assert not controls(worker.output)
    (line,) = crawl.our_lines("has expired without a heartbeat")
    assert f"The lease of the worker {ESCAPED}{PLAIN} of the queue" in line
    site.end()


@pytest.mark.parametrize(
    "slot", [b"\xff\x1b[2J\xfe", b"a\xed\xa0\x80\x9b", b"a\n\xe2\x80\xae", b"", b"\xff" * 300]
)
def test_hosts(slot: bytes, shared: InRedis, tmp_path: Path) -> None:
    """They need not be UTF-8. The other hosts can be read and changed all the same."""
    worker = shared.open()
    enter(worker, Entered(serialized({"url": "https://b.example/1"}), slot="b.example"))
    worker.close()

    class Foreign(Row):
        order = property(lambda _: slot + packed_order("", 0, 0))  # type: ignore[assignment]

    urls_of = {State.PENDING: "https://\x1b\ud800/", State.DEAD: "b"}
    rows = [Foreign(data=serialized({"url": url}), state=state) for state, url in urls_of.items()]
    fill_shared(shared.server, shared.key, rows)
    place = f"{shared.url}#{shared.key}"
    for options in ([], ["--dead"], ["--json"], ["--dead", "--json"]):
        ran = bloom("queue", place, *options, cwd=tmp_path)
        assert ran.status == 0, ran
        assert not controls(ran.out + ran.err)
        assert ("b.example" in ran.out) == ("--dead" not in options)
    assert bloom("report", place, "-o", "page.html", cwd=tmp_path).status == 0
    assert not controls((tmp_path / "page.html").read_text())
    ran = bloom("queue", place, "--drop-host", "b.example", "--yes", cwd=tmp_path)
    assert "1 pending request of b.example dropped" in ran.out
    assert bloom("copy", place, "job", cwd=tmp_path).status == 0
    assert len(bloom("queue", "job", "--json", cwd=tmp_path).json["next"]) == 1


def test_a_spiders_name_in_the_log(tmp_path: Path) -> None:
    site = wide_site()
    settings = {"BLOOM_REDIS_KEY": f"%(spider)s{tmp_path}"}
    crawl = SharedCrawl(site, tmp_path, code=f"\nLinkSpider.name = {EVIL + PLAIN!r}", **settings)
    crawl.start()
    crawl.finish()
    ours = [line for worker in crawl.workers for line in worker.our_lines("INFO")]
    assert any(f"key {ESCAPED}{PLAIN}{tmp_path}: " in line for line in ours)
    assert not any(map(controls, ours))
    site.end()


@pytest.mark.parametrize("name", ["list.txt", "list.jl"])
def test_the_first_line_of_a_list(name: str, tmp_path: Path) -> None:
    """What Python says of it quotes it as it is."""
    make_filter(tmp_path / "filter", fingerprints(urls(range(3))))
    url = "http://shop.example:\x1bc\x9b31m\u202e\u2028/"
    (tmp_path / name).write_text(json.dumps({"url": url}) if name == "list.jl" else f"{url}\n")
    error = bloom("check", "filter", name, cwd=tmp_path).error
    assert not controls(error)
    assert r"as \x1bc\x9b31m\u202e\u2028; " in error


def test_square_brackets_are_no_markup(tmp_path: Path) -> None:
    make_filter(tmp_path / "f1", fingerprints(urls(range(3))), spider="[/x][bold]")
    for place, copy in (("f1", "c[/x]"), ("c[/x]", "[red]d")):
        assert f"Copied {place} to {copy}: " in bloom("copy", place, copy, cwd=tmp_path).out
        shown = bloom("info", copy, cwd=tmp_path).out
        assert f"/{copy}\n" in shown
        assert "[/x][bold]\n" in shown
    assert "c[/x]x does not exist" in bloom("info", "c[/x]x", cwd=tmp_path).error


def test_a_name_of_a_file(tmp_path: Path) -> None:
    write_urls(tmp_path / "urls.txt", urls(range(3)))
    assert not controls(bloom("info", EVIL, cwd=tmp_path).error)
    ran = bloom("import", "urls.txt", EVIL, cwd=tmp_path)
    assert ran.status == 0
    assert not controls(ran.out + ran.err)
    ran = bloom("info", "--" + EVIL, "x", cwd=tmp_path)
    assert ran.status == 2
    assert not controls(ran.err)
    shown = at_a_terminal("reset", EVIL, cwd=tmp_path, answer=b"n\n")
    assert not controls(shown.out) - {"\r"}


def test_urls_are_printed_as_they_are_but_at_a_terminal(tmp_path: Path) -> None:
    make_filter(tmp_path / "filter", fingerprints(urls(range(3))))
    url = f"https://shop.example/\x1b[2J\u202e{PLAIN}"
    (tmp_path / "list.txt").write_text(f"{url}\n")
    assert bloom("check", "filter", "list.txt", cwd=tmp_path).out == f"{url}\n"
    shown = at_a_terminal("check", "filter", "list.txt", cwd=tmp_path)
    assert rf"https://shop.example/\x1b[2J\u202e{PLAIN}" in shown.out
