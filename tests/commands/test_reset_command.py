"""`scrapy bloom reset`: it asks, and leaves nothing of a filter in files or in Redis."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from scrapy_bloom.job.jobdir import FILE
from scrapy_bloom.redis.layout import keys_of, named_keys
from tests.support import servers
from tests.support.cli import Ran, at_a_terminal, bloom
from tests.support.crawls import SPIDER, run_script
from tests.support.jobs import PLACES, Job
from tests.support.request_queues import fill
from tests.support.shared_crawls import PAGES, SharedCrawl, wide_site
from tests.support.sites import Site
from tests.support.workspace import (
    contents,
    fingerprints,
    make_filter,
    make_queue,
    shared_filter,
    urls,
)

FIRST = "/p/0"  # which start() and all pages lead to


def test_reset_asks(tmp_path: Path) -> None:
    make_filter(tmp_path / "job", fingerprints(urls(range(300))), capacity=100)
    (tmp_path / "job/requests.queue").mkdir()
    (tmp_path / "job/requests.queue/active.json").write_text("[]")
    before = contents(tmp_path)
    nobody = bloom("reset", "job", cwd=tmp_path)
    assert "add --yes" in nobody.error
    no = at_a_terminal("reset", "job", cwd=tmp_path, answer=b"n\n")
    assert no.status == 1
    assert "nothing was changed" in no.out
    after = contents(tmp_path)
    lock = "job/bloom.lock"  # an older filelock sets its time
    assert {**after, lock: ()} == {**before, lock: ()}
    yes = at_a_terminal("reset", "job", cwd=tmp_path, answer=b"y\n")
    assert yes.status == 0, yes
    assert "Deleted the filter of job (300 requests recorded, " in yes.out
    assert set(before) - set(contents(tmp_path)) == {"job/bloom.sqlite"}
    assert "job holds no filter" in bloom("reset", "job", "--yes", cwd=tmp_path).error


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("part", [(), ("--queue",)], ids=["both", "queue"])
def test_reset_means_the_same_in_files_and_in_redis(
    place: str, part: tuple[str, ...], wide: Site, tmp_path: Path
) -> None:
    job = Job(place, tmp_path, wide, SPIDER)
    (crawl,) = job.hold(20)
    assert " in use by" in (error := job.bloom("reset", *part).error) or " uses the " in error
    job.interrupt(crawl)
    before = job.bloom("info", "--json").json
    pending, crawled = before["queue"]["pending"], set(wide.hits)
    assert pending > 0
    question = job.bloom("reset", *part).error
    assert (f"({before['recorded']} requests recorded, " in question) is (part != ("--queue",))
    assert f"({pending} pending)" in question
    assert job.bloom("reset", *part, "--yes").status == 0
    again = job.crawl_alone()
    assert not again.our_lines("ERROR")
    if part == ("--queue",):
        assert set(wide.hits) <= {FIRST}  # which a new run crawls once more
        return
    assert crawled <= set(wide.hits)
    assert len(wide.hits) == PAGES
    assert not again.our_lines("WARNING")
    assert {path for path, number in wide.hits.items() if number > 1} <= {FIRST}


SWAPPED = """
    import os, sys
    from scrapy.cmdline import execute
    from scrapy_bloom.commands import reset

    def swap(*_):
        os.rename("job", "away")
        {}

    reset.confirm = swap
    execute(["scrapy", "bloom", "reset", "job", *sys.argv[1:]])
"""
SWAPS = {
    "a link": "os.symlink('other', 'job')",
    "a directory": "os.rename('other', 'job')",
    "nothing": "",
}


@pytest.mark.parametrize(
    ("swap", "part"), [("a link", ()), ("a directory", ("--queue",)), ("nothing", ())]
)
def test_a_directory_that_was_swapped_after_the_question_keeps_its_files(
    swap: str, part: tuple[str, ...], tmp_path: Path
) -> None:
    for name in ("job", "other"):
        make_filter(tmp_path / name, fingerprints(urls(range(30))))
        fill(tmp_path / name / FILE, b"a request")
        bloom("add", name, "http://127.0.0.1:9/", cwd=tmp_path)
    before = {name: contents(tmp_path / name) for name in ("job", "other")}
    ran = run_script(SWAPPED.format(SWAPS[swap]), *part, cwd=tmp_path)
    assert ran.returncode == 1, ran
    assert "job was removed, or replaced by another directory, while this command" in ran.stderr
    after = {"job": tmp_path / "away", "other": tmp_path / "other"}
    if swap == "a directory":
        after["other"] = tmp_path / "job"
    for name, directory in after.items():
        left = contents(directory)
        left.pop("bloom.lock", None)
        before[name].pop("bloom.lock", None)
        assert left == before[name]


# A shared queue.


@pytest.fixture
def crawl(tmp_path: Path) -> Iterator[SharedCrawl]:
    site = wide_site()
    crawl = SharedCrawl(site, tmp_path)
    crawl.hold(20)
    yield crawl
    site.end()


def reset(crawl: SharedCrawl, *options: str) -> Ran:
    return bloom("reset", f"{crawl.server.url}#{crawl.key}", *options, cwd=crawl.directory)


@pytest.mark.parametrize("part", [(), ("--queue",)], ids=["both", "queue"])
def test_force_deletes_and_says_what_workers_do(part: tuple[str, ...], crawl: SharedCrawl) -> None:
    error = reset(crawl, *part, "--yes").error
    question = reset(crawl, *part, "--force").error
    assert "nothing was deleted" in error
    assert "Cannot ask without a terminal" in question
    assert all(worker.name in error and worker.name in question for worker in crawl.state().workers)
    used = r"\(\d+ pending, \d+ in flight; workers use it now, and start over: "
    assert re.search(used, question)
    loses = "not crawled: the filter, if there is one, has recorded them" in question
    assert loses == bool(part)
    assert reset(crawl, *part, "--force", "--yes").status == 0
    crawl.finish()  # as the question says
    assert (len(crawl.site.hits) < PAGES) == loses


DAMAGES = [
    ("filter", b"done", b"many"),
    ("filter", b"done", b"9" * 5000),
    ("filter", b"ended", b"nan"),
    ("filter", b"ended", b"1e308"),
    ("workers", b"0123456789abcdef", b"soon"),
    ("workers", b"\xff" * 16, b"1"),
    ("workers", b"x", b"1"),
]


def test_a_damaged_queue_is_reported_and_can_be_deleted(
    key: str, server: servers.Server, tmp_path: Path
) -> None:
    for number, (name, field, value) in enumerate(DAMAGES):
        there = f"{key}:{number}"
        place = f"{server.url}#{there}"
        shared_filter(server, there, fingerprints(urls(range(10))))
        make_queue(server.url, there)
        server.client.hset(named_keys(there)[name], field, value)
        before = {entry: server.client.dump(entry) for entry in keys_of(there)}
        commands = (
            ("info", place),
            ("copy", place, "copy"),
            ("reset", place, "--yes"),
            ("reset", place, "--queue", "--yes"),
            ("queue", place, "--requeue", "--yes"),
        )
        for command in commands if number == 0 else commands[:1]:
            error = bloom(*command, cwd=tmp_path).error
            assert "damaged" in error, command
            assert "reset --queue --force" in error
            assert len(error) < 600
            assert {entry: server.client.dump(entry) for entry in keys_of(there)} == before
        ran = bloom("reset", place, "--queue", "--force", "--yes", cwd=tmp_path)
        assert ran.status == 0, ran
        assert not server.client.exists(*keys_of(there)[1:])
    assert bloom("info", place, "--json", cwd=tmp_path).json["recorded"] == 10


def test_nothing_stays_of_a_filter_that_was_reset(
    key: str, place: tuple[str, ...], server: servers.Server, tmp_path: Path
) -> None:
    shared_filter(server, key, fingerprints(urls(range(10))))
    assert "has no queue" in bloom("reset", *place, "--queue", "--yes", cwd=tmp_path).error
    make_queue(server.url, key)
    expired = f"{{{key}}}:blocks:0123456789abcdef"
    server.client.hset(key, "unlink:0123456789abcdef", "")
    server.client.set(f"{expired}:0", "of a generation that has expired")
    server.client.set(f"{expired}:made", b"\xc0")  # its only key, and the bit after that
    assert bloom("reset", *place, "--yes", cwd=tmp_path).status == 0
    assert not server.client.keys(f"*{key}*")
    assert "has no filter" in bloom("reset", *place, "--yes", cwd=tmp_path).error
