"""`scrapy bloom import` that is interrupted, or has no room: repeated, it goes on."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest

from scrapy_bloom.files.directory import FilterReader
from tests.support import servers
from tests.support.cli import SCRAPY, at_a_terminal, bloom
from tests.support.workspace import (
    fingerprints,
    urls,
    write_urls,
)


@contextmanager
def half_given(fifo: Path) -> Iterator[Callable[[], None]]:
    """Make a pipe that gives URLs, and others when the function is called: no import ends before.

    The first ones fill a filter of 10,000 requests twice.
    """
    os.mkfifo(fifo)
    is_over = threading.Event()

    def give() -> None:
        with suppress(BrokenPipeError), fifo.open("w") as file:
            for start in (0, 30_000):
                file.writelines(f"{url}\n" for url in urls(range(start, start + 30_000)))
                file.flush()
                is_over.wait(60)

    thread = threading.Thread(target=give, daemon=True)
    thread.start()
    try:
        yield is_over.set
    finally:
        is_over.set()
        thread.join(10)
        fifo.unlink()


def interrupted(tmp_path: Path, signal_number: int) -> int:
    """Begin an import, and end it by a signal in the middle."""
    with half_given(tmp_path / "fifo"):
        process = subprocess.Popen(
            [SCRAPY, "bloom", "import", "fifo", "filter", "-n", "10k"],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # A shell that starts us in the background lets us ignore it, and so would it.
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
        )
        end = time.monotonic() + 60
        while len(list(tmp_path.glob("filter/*.bloom"))) < 2 and time.monotonic() < end:
            time.sleep(0.005)  # it has grown: it is under way
        process.send_signal(signal_number)
        out, err = process.communicate(timeout=60)
    if signal_number == signal.SIGINT:
        assert "requests are recorded; repeat the command to continue" in err
        assert "Traceback" not in err
    assert not out
    return process.returncode


def test_it_can_be_interrupted_and_repeated(tmp_path: Path) -> None:
    write_urls(tmp_path / "few.txt", urls(range(1000)))
    assert bloom("import", "few.txt", "filter", "-n", "10k", cwd=tmp_path).status == 0
    write_urls(tmp_path / "urls.txt", urls(range(70_000)))
    assert interrupted(tmp_path, signal.SIGKILL) == -signal.SIGKILL
    figures = bloom("info", "filter", "--json", cwd=tmp_path).json
    assert figures["closed"] is True  # no crawl has lost its queue
    for path in sorted(tmp_path.glob("filter/generation-000[2-9].bloom")):
        path.unlink()  # so that the next one begins to grow again
    assert interrupted(tmp_path, signal.SIGINT) == -signal.SIGINT
    ran = bloom("import", "urls.txt", "filter", "--json", cwd=tmp_path)
    assert ran.status == 0
    assert 0 < ran.json["new"] < 70_000
    assert is_exactly_the_first(tmp_path / "filter", 70_000)


def is_exactly_the_first(path: Path, number: int) -> bool:
    reader = FilterReader(path)
    return all(
        all(reader.are_seen(fingerprints(urls(range(start, start + 10_000)))))
        for start in range(0, number, 10_000)
    )


@pytest.mark.parametrize("on_full", ["grow", "warn", "close"])
def test_it_grows_whatever_a_crawl_would_do(on_full: str, tmp_path: Path) -> None:
    lines = "\n".join(urls(range(5000)))
    options = ("-n", "1000", "-s", f"BLOOM_ON_FULL={on_full}", "--json")
    figures = bloom("import", "-", "filter", *options, cwd=tmp_path, stdin=lines).json
    assert figures["error_rate_now"] <= 1e-6
    assert figures["generations"] > 1


def test_no_room_to_grow(tmp_path: Path) -> None:
    """A filter that is full by far would take most pages for seen."""
    write_urls(tmp_path / "urls.txt", urls(range(60_000)))
    ran = bloom(
        *("import", "-", "filter", "-n", "2000"),
        cwd=tmp_path,
        stdin="\n".join(urls(range(60_000))),
        under=["prlimit", "--fsize=100000"],
    )
    assert ran.status == 1
    assert "the filter is full, and there is no room for another generation" in ran.err
    assert "repeat the command to continue" in ran.err
    assert ran.err.count("\n") == 1
    figures = bloom("info", "filter", "--json", cwd=tmp_path).json
    assert figures["error_rate_now"] < 1e-4
    assert bloom("import", "urls.txt", "filter", cwd=tmp_path).status == 0


def test_a_window_is_not_ended(tmp_path: Path) -> None:
    write_urls(tmp_path / "urls.txt", urls(range(10)))
    window = ("-s", "BLOOM_WINDOW_SECS=3600")
    assert bloom("import", "urls.txt", "filter", *window, cwd=tmp_path).status == 0
    assert "BLOOM_WINDOW_SECS" in bloom("import", "urls.txt", "filter", cwd=tmp_path).error
    place = servers.shared("valkey").url
    into_redis = ("import", "urls.txt", place, "--key", tmp_path.name)
    assert bloom(*into_redis, *window, cwd=tmp_path).status == 0
    assert "BLOOM_WINDOW_SECS" in bloom(*into_redis, cwd=tmp_path).error


def test_a_server_that_goes_away(tmp_path: Path) -> None:
    server, quick = servers.Server(), ("-s", "BLOOM_REDIS_DEADLINE_SECS=1")
    place = f"{server.url}?socket_timeout=10"  # one that is only slow is not away
    with half_given(tmp_path / "fifo") as give_the_rest:
        process = subprocess.Popen(
            [SCRAPY, "bloom", "import", "fifo", place, "--key", "x", *quick],
            cwd=tmp_path,
            stderr=subprocess.PIPE,
            text=True,
        )
        servers.wait_for(
            lambda: "cmdstat_bitfield" in server.client.info("commandstats"),
            lambda: "nothing is imported",
        )
        server.end()
        give_the_rest()
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert err.count("\n") == 1
    assert "cannot be used" in err
    assert "repeat the command to continue" in err


def test_how_far_it_is_shows_at_a_terminal(tmp_path: Path) -> None:
    write_urls(tmp_path / "urls.txt", urls(range(300_000)))
    ran = at_a_terminal("import", "urls.txt", "filter", cwd=tmp_path)
    assert ran.status == 0, ran
    shown = re.findall(r"Importing.*? ([\d,]+) requests .*?([\d,]+)/s", ran.out)
    assert len(shown) > 1
    done = [int(number.replace(",", "")) for number, _ in shown]
    assert 0 < max(done) <= 300_000
    assert done == sorted(done)


def peak_bytes(*arguments: str, cwd: Path, status: int = 0) -> int:
    """The most memory that a command had, as the kernel counts it."""
    # From a small process: until it begins, a program counts as large as the one that starts it.
    code = (
        "import resource, subprocess, sys\n"
        f"assert subprocess.run(sys.argv[1:], stdout=-3).returncode == {status}\n"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    command = [sys.executable, "-c", code, SCRAPY, "bloom", *arguments]
    ran = subprocess.run(command, cwd=cwd, capture_output=True, timeout=100, check=True)
    return int(ran.stdout) * 1024
