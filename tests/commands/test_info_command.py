"""`scrapy bloom info`: the right place, the salt kept, the runs and the error rate asked for."""

from pathlib import Path

import pytest

from scrapy_bloom.job import jobdir
from tests.support import servers
from tests.support.cli import bloom
from tests.support.crawls import Crawl
from tests.support.request_queues import begun
from tests.support.sites import Site
from tests.support.workspace import (
    SALT,
    fingerprints,
    in_redis,
    make_filter,
    make_queue,
    shared_filter,
    urls,
)

DAY = 24 * 3600.0


@pytest.mark.parametrize("kind", ["files", "redis"])
def test_the_salt_is_secret(kind: str, key: str, server: servers.Server, tmp_path: Path) -> None:
    if kind == "files":
        make_filter(tmp_path / "filter", fingerprints(urls(range(5))), salt=SALT)
        where = ["filter"]
    else:
        shared_filter(server, key, [], salt=SALT)
        where = [f"{server.url}#{key}"]
    for more in ([], ["--json"], ["--scan"]):
        ran = bloom("info", *where, *more, cwd=tmp_path)
        assert ran.status == 0, ran
        assert SALT.hex() not in ran.out + ran.err


def test_the_runs_and_the_error_rate_asked_for(tmp_path: Path) -> None:
    options = {"capacity": 400, "error_rate": 1e-5, "window_secs": 7 * DAY}
    for now in (1.7e9, 1.7e9 + DAY / 2, 1.7e9 + 2 * DAY):
        make_filter(tmp_path / "filter", fingerprints(urls(range(5))), clock=lambda: now, **options)  # noqa: B023
    figures = bloom("info", "filter", "--json", cwd=tmp_path).json
    assert [(figure["first_run"], figure["last_run"]) for figure in figures["generations"]] == [
        (1.7e9, 1.7e9 + DAY / 2),
        (1.7e9 + 2 * DAY, 1.7e9 + 2 * DAY),
    ]
    assert figures["error_rate_asked"] == 1e-5
    text = bloom("info", "filter", cwd=tmp_path).out
    assert "last run" in text
    assert "2023-11-15" in text
    assert "2023-11-16" in text
    assert "; target 1e-05\n" in text


def test_one_shape_of_the_json(key: str, server: servers.Server, tmp_path: Path) -> None:
    """Whether the filter is in files or in Redis, with a queue, without one, or a queue alone."""
    url = server.url
    make_filter(tmp_path / "alone", fingerprints(urls(range(5))))
    make_filter(tmp_path / "job", fingerprints(urls(range(5))))
    (tmp_path / "queue").mkdir()
    for name in ("job", "queue"):
        begun(tmp_path / name / jobdir.FILE).close()
    assert bloom("copy", "alone", f"{url}#{key}:1", cwd=tmp_path).status == 0
    assert bloom("copy", "alone", f"{url}#{key}:2", cwd=tmp_path).status == 0
    make_queue(url, f"{key}:2")
    alone, job = str(tmp_path / "alone"), str(tmp_path / "job")
    wanted = {
        "alone": (alone, 5, False),
        "job": (job, 5, True),
        "queue": ("queue", None, True),
        **{f"{key}:{n}": (None, *more) for n, more in enumerate(((5, False), (5, True)), 1)},
    }
    shapes, of_queues, of_generations = set(), set(), set()
    for place, (location, recorded, has_queue) in wanted.items():
        where = [f"{url}#{place}"] if location is None else [place]
        figures = bloom("info", *where, "--json", cwd=tmp_path).json
        if recorded:
            shapes.add(tuple(figures))
        else:
            assert set(figures) == {"location", "queue"}
        of_generations |= {tuple(entry) for entry in figures.get("generations", ())}
        assert url.split("/")[2] in figures["location"] or figures["location"] == location
        assert figures.get("recorded") == recorded, place
        assert bool(figures["queue"]) == has_queue, place
        if has_queue:
            of_queues.add(frozenset(figures["queue"]))
            assert figures["queue"]["pending"] == (location is None)
            assert bloom("info", *where, cwd=tmp_path).status == 0
        else:
            assert figures["queue"] is None
    assert len({frozenset(shape) for shape in shapes}) == len(of_queues) == len(of_generations) == 1


SAFE = "scrapy_bloom.CrashSafeScheduler"


def test_figures_of_a_killed_worker(
    key: str, place: tuple[str, ...], tree: Site, tmp_path: Path
) -> None:
    leases = in_redis(key, SCHEDULER=SAFE, BLOOM_QUEUE_LEASE_SECS=1)
    Crawl.held(tree, 20, tmp_path, leases).kill()

    def dead() -> bool:
        (worker,) = bloom("info", *place, "--json", cwd=tmp_path).json["queue"]["workers"]
        return not worker["is_alive"]

    servers.wait_for(dead, lambda: "the lease of a killed worker does not end")
    queue = bloom("info", *place, "--json", cwd=tmp_path).json["queue"]
    (worker,) = queue["workers"]
    assert worker["in_flight"] == queue["in_flight"] > 0
    assert queue["done"] > 0
    text = bloom("info", *place, cwd=tmp_path).out
    assert f"{queue['pending']:,} pending, {queue['in_flight']:,} in flight; " in text
    assert "expired" in text


def test_the_filters_of_a_server(tmp_path: Path) -> None:
    with servers.Server("valkey") as own:  # that no other test uses
        assert bloom("info", own.url, cwd=tmp_path).out == f"{own.url} has no filter\n"
        shared_filter(own, "plain", fingerprints(urls(range(10))), spider="shop")
        shared_filter(own, "broken", [])
        own.client.hset("broken", "version", "?")
        ran = bloom("info", own.url, "--json", cwd=tmp_path)
        (plain,) = ran.json["filters"]
        names = ("location", "spider", "recorded", "capacity", "bytes")
        figures = [plain[name] for name in names]
        assert figures == [f"{own.url}, key plain", "shop", 10, 1000, 8192]
        assert "warning: the key 'broken'" in ran.err
        _, row = bloom("info", own.url, cwd=tmp_path).out.splitlines()
        assert row.split()[1:] == ["key", "plain", "shop", "10", "1,000", "8.0", "KiB"]


def test_the_filters_of_a_cluster(key: str, tmp_path: Path) -> None:
    url = servers.shared_cluster().url
    make_filter(tmp_path / "filter", [b"page"])
    places = [f"{url}#{key}:{number}" for number in range(3)]  # of several masters
    for place in places:
        assert bloom("copy", "filter", place, cwd=tmp_path).status == 0
    filters = bloom("info", url, "--json", cwd=tmp_path).json["filters"]
    assert {place.replace("#", ", key ") for place in places} <= {
        each_filter["location"] for each_filter in filters
    }
