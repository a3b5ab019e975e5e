"""`scrapy bloom queue`: what is pending, what comes next, and dead letters."""

import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest

from scrapy_bloom.queues.batch import Found, serialized
from tests.support.cli import bloom
from tests.support.request_queues import InFile, InRedis, Trap, find, leave_dead_letter, take

HOSTILE = "a.example\x1b[2J"


def found(host: str, number: int, priority: int = 0) -> Found:
    request = {"url": f"https://{host}/{number}", "priority": priority, "meta": {"depth": 2}}
    data = serialized(request)
    return Found(data, slot=host, priority=priority, rank=0, newest_first=False)


@pytest.fixture(params=["a job", "redis"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, ...]]:
    """A queue that no process uses: many requests of b.example, few of two others, and a trap."""
    trap = pickle.dumps({"url": Trap(tmp_path / "sprung")})
    requests = [found("b.example", number, priority=number) for number in range(20)]
    requests += [found(HOSTILE, number) for number in range(3)]
    requests += [Found(trap, slot="trap.example", priority=0, rank=0, newest_first=False)]
    if request.param == "a job":
        there = InFile(tmp_path)
        arguments: tuple[str, ...] = (str(there.path.parent),)
    else:
        there = InRedis("valkey", str(tmp_path))
        arguments = (there.url, "--key", str(tmp_path))
    store = there.open(by_slot=True)
    find(store, *requests)
    there.leave(store)
    yield arguments
    there.end()


def test_what_is_pending_and_what_comes_next(place: tuple[str, ...], tmp_path: Path) -> None:
    queue = bloom("queue", *place, "--next", "4", "--json", cwd=tmp_path).json
    assert (queue["pending"], queue["in_flight"], queue["dead"], queue["hosts"]) == (24, 0, 0, 3)
    assert [each["pending"] for each in queue["most_pending"]] == [20, 3, 1]
    assert queue["most_pending"][0]["host"] == "b.example"
    urls = [each["url"] for each in queue["next"]]
    assert urls == [
        f"https://{HOSTILE}/0",
        "https://b.example/19",
        "a request that cannot be read",
        f"https://{HOSTILE}/1",
    ]
    assert (queue["next"][1]["priority"], queue["next"][1]["depth"]) == (19, 2)
    assert not (tmp_path / "sprung").exists()


def test_the_output_for_people(place: tuple[str, ...], tmp_path: Path) -> None:
    ran = bloom("queue", *place, cwd=tmp_path)
    assert ran.status == 0
    assert "0 in flight; 24 pending" in ran.out
    assert r"a.example\x1b[2J" in ran.out
    assert "\x1b" not in ran.out
    assert ran.out.count("https://b.example/") == 10 - 3 - 1
    assert not (tmp_path / "sprung").exists()
    assert "0 dead letters of " in bloom("queue", *place, "--dead", cwd=tmp_path).out


def test_more_hosts_than_are_shown(tmp_path: Path) -> None:
    there = InFile(tmp_path)
    store = there.open(by_slot=True)
    find(store, *(found(f"{number:02}.example", 1) for number in range(15)))
    there.leave(store)
    assert "5 further hosts: 5 pending" in bloom("queue", there.path.parent, cwd=tmp_path).out
    there.end()


def test_a_host_is_dropped(place: tuple[str, ...], tmp_path: Path) -> None:
    asked = bloom("queue", *place, "--drop-host", "b.example", cwd=tmp_path)
    assert "Drop 20 pending requests of b.example? They are not crawled" in asked.error
    for host, number in (("b.example", 20), (HOSTILE, 3), ("b.example", 0)):
        ran = bloom("queue", *place, "--drop-host", host, "--yes", cwd=tmp_path)
        assert f"{number} pending requests of " in ran.out
        assert "\x1b" not in ran.out
    queue = bloom("queue", *place, "--json", cwd=tmp_path).json
    assert (queue["pending"], queue["hosts"]) == (1, 1)
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("kind", ["a job", "redis"])
def test_dead_letters_are_shown_and_dropped(kind: str, tmp_path: Path) -> None:
    there = InFile(tmp_path) if kind == "a job" else InRedis("valkey", str(tmp_path))
    leave_dead_letter(there, found("deadly.example", 1))
    arguments = (str(tmp_path / "queue"),) if kind == "a job" else (there.url, "--key", there.key)
    for each in ("--requeue", "--drop"):
        ran = bloom("queue", *arguments, each, "--json", cwd=tmp_path)
        assert "they show nothing: leave --dead and --json out" in ran.err
    words = bloom("info", *arguments, cwd=tmp_path).out.split()
    assert "1 dead letter (https://deadly.example/1)" in " ".join(words)
    assert "Nobody can be asked" in bloom("queue", *arguments, "--requeue", cwd=tmp_path).error
    dead = bloom("queue", *arguments, "--dead", "--json", cwd=tmp_path).json["dead"]
    assert [each["reason"] for each in dead] == [
        "was in flight in four processes that died, the last time alone"
    ]
    ran = bloom("queue", *arguments, "--drop", "--yes", cwd=tmp_path)
    assert ran.out.startswith("1 dead letter of ")
    queue = bloom("queue", *arguments, "--json", cwd=tmp_path).json
    assert (queue["pending"], queue["in_flight"], queue["dead"]) == (0, 0, 0)
    store = there.open()  # nothing seems to be missing
    find(store, found("b.example", 1))
    assert take(store)
    there.end()
