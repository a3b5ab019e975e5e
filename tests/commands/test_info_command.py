"""`scrapy bloom info`: the right place, the salt kept, the window and the error rate asked for."""

import time
from pathlib import Path

import pytest

from scrapy_bloom.job import paths as jobdir
from scrapy_bloom.redis.connection.server import RedisServer
from tests.support import servers
from tests.support.backends import redis_backend
from tests.support.cli import bloom
from tests.support.request_queues import begun
from tests.support.workspace import (
    FINGERPRINTER,
    SALT,
    fingerprints,
    make_filter,
    make_queue,
    urls,
)

DAY = 24 * 3600.0


def test_a_path_that_is_not_there_is_not_its_parent(tmp_path: Path) -> None:
    make_filter(tmp_path / "job/bloom", fingerprints(urls(range(5))))
    begun(tmp_path / "job" / jobdir.DATABASE).close()
    for path in ("job", "job/bloom"):
        figures = bloom("info", path, "--json", cwd=tmp_path).json
        assert figures["recorded"] == 5
        assert (figures["queue"]["pending"], figures["queue"]["in_flight"]) == (0, 0)
    error = bloom("info", "job/typo", cwd=tmp_path).error
    assert "job/typo holds no filter" in error
    assert "there is no such file or directory" in error
    (tmp_path / "job/other").mkdir()
    assert "job/other holds no filter" in bloom("info", "job/other", cwd=tmp_path).error


@pytest.mark.parametrize("place", ["files", "redis"])
def test_the_salt_is_shown_to_who_asks_for_it(place: str, tmp_path: Path) -> None:
    if place == "files":
        make_filter(tmp_path / "filter", fingerprints(urls(range(5))), salt=SALT)
        where = ["filter"]
    else:
        url, key = servers.shared("valkey").url, f"{tmp_path.name}:bloom"
        backend = redis_backend(
            RedisServer(url),
            key,
            capacity=1000,
            error_rate=1e-6,
            fingerprinter=FINGERPRINTER,
            salt=SALT,
        )
        backend.open()
        backend.begin()
        backend.close()
        where = [url, "--key", key]
    for more in ([], ["--json"], ["--scan"]):
        ran = bloom("info", *where, *more, cwd=tmp_path)
        assert ran.status == 0, ran
        assert SALT.hex() not in ran.out + ran.err
        assert "***" in ran.out
    assert SALT.hex() in bloom("info", *where, "--show-salt", cwd=tmp_path).out
    figures = bloom("info", *where, "--show-salt", "--json", cwd=tmp_path).json
    assert figures["salt"] == SALT.hex()
    assert figures["error_rate_asked"] == 1e-6


@pytest.mark.parametrize("on_full", ["grow", "warn", "close"])
@pytest.mark.parametrize("window", [0.0, 2 * DAY])
def test_the_window_and_the_error_rate_asked_for(
    on_full: str, window: float, tmp_path: Path
) -> None:
    options = {"capacity": 400, "error_rate": 1e-5, "on_full": on_full, "window_secs": window}
    now = time.time() - DAY
    make_filter(tmp_path / "filter", fingerprints(urls(range(350))), clock=lambda: now, **options)
    more = ("-s", f"BLOOM_ON_FULL={on_full}")
    figures = bloom("info", "filter", "--json", *more, cwd=tmp_path).json
    assert bloom("info", "filter", "--json", cwd=tmp_path).json == figures
    assert figures["window_secs"] == (window or None)
    assert figures["error_rate_asked"] == 1e-5
    text = bloom("info", "filter", *more, cwd=tmp_path).out
    assert f"window:          {'2 days' if window else 'none'}\n" in text
    assert "; asked for 1e-05\n" in text


def test_one_shape_of_the_json(tmp_path: Path) -> None:
    """Whether the filter is in files or in Redis, with a queue, without one, or a queue alone."""
    url, key = servers.shared("valkey").url, f"{tmp_path.name}:bloom"
    make_filter(tmp_path / "alone", fingerprints(urls(range(5))))
    make_filter(tmp_path / "job/bloom", fingerprints(urls(range(5))))
    (tmp_path / "queue").mkdir()
    for name in ("job", "queue"):
        begun(tmp_path / name / jobdir.DATABASE).close()
    assert bloom("push", "alone", url, "--key", f"{key}:1", cwd=tmp_path).status == 0
    assert bloom("push", "alone", url, "--key", f"{key}:2", cwd=tmp_path).status == 0
    make_queue(url, f"{key}:2")
    wanted = {
        "alone": ("alone", 5, False),
        "alone/generation-0001.bloom": ("alone", 5, False),
        "job": ("job/bloom", 5, True),
        "queue": ("queue", None, True),
        **{f"{key}:{n}": (None, *more) for n, more in enumerate(((5, False), (5, True)), 1)},
    }
    shapes, of_queues, of_generations = set(), set(), set()
    for place, (location, recorded, has_queue) in wanted.items():
        where = [url, "--key", place] if location is None else [place]
        figures = bloom("info", *where, "--json", cwd=tmp_path).json
        shapes.add(tuple(figures))
        of_generations |= {tuple(each) for each in figures["generations"]}
        assert figures["location"] == location or url.split("/")[2] in figures["location"]
        assert figures["recorded"] == recorded, place
        assert bool(figures["queue"]) == has_queue, place
        if has_queue:
            of_queues.add(frozenset(figures["queue"]))
            assert figures["queue"]["pending"] == (location is None)
            assert bloom("info", *where, cwd=tmp_path).status == 0
        else:
            assert figures["queue"] is None
    assert len({frozenset(each) for each in shapes}) == len(of_queues) == len(of_generations) == 1
