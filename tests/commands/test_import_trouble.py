"""`scrapy bloom import` that is interrupted, or has no room: a second one continues it."""

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest

from scrapy_bloom.job.reader import FilterReader
from tests.support import servers
from tests.support.cli import SCRAPY, bloom
from tests.support.crawls import with_modules
from tests.support.workspace import fingerprints, make_filter, urls, write_urls


@contextmanager
def half_given(fifo: Path) -> Iterator[Callable[[], None]]:
    """Make a pipe that gives URLs, and others when the function is called: no import ends before.

    The first ones fill a filter of 2,000 requests twice.
    """
    os.mkfifo(fifo)
    is_over = threading.Event()

    def give() -> None:
        with suppress(BrokenPipeError), fifo.open("w") as file:
            for start in (0, 6000):
                file.writelines(f"{url}\n" for url in urls(range(start, start + 6000)))
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


def generations(job: Path) -> int:
    with closing(FilterReader(job / "bloom.sqlite")) as reader:
        return len(reader.generations)


def interrupted(tmp_path: Path, signal_number: int) -> int:
    with half_given(tmp_path / "fifo"):
        process = subprocess.Popen(
            [SCRAPY, "bloom", "import", "fifo", "filter", "-s", "BLOOM_EXPECTED_REQUESTS=2k"],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # A shell that starts us in the background lets us ignore it, and so would it.
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
        )
        servers.wait_for(lambda: generations(tmp_path / "filter") > 1, str)  # it is under way
        process.send_signal(signal_number)
        out, err = process.communicate(timeout=60)
    if signal_number == signal.SIGINT:
        assert err == "scrapy bloom: error: interrupted\n"
    assert not out
    return process.returncode


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_it_can_be_interrupted_and_repeated(number: signal.Signals, tmp_path: Path) -> None:
    write_urls(tmp_path / "few.txt", urls(range(500)))
    size = ("-s", "BLOOM_EXPECTED_REQUESTS=2k")
    assert bloom("import", "few.txt", "filter", *size, cwd=tmp_path).status == 0
    write_urls(tmp_path / "urls.txt", urls(range(14_000)))
    assert interrupted(tmp_path, number) == -number
    ran = bloom("import", "urls.txt", "filter", "--json", cwd=tmp_path)
    assert ran.status == 0, ran
    assert 0 < ran.json["new"] < 14_000
    with closing(FilterReader(tmp_path / "filter/bloom.sqlite")) as reader:
        assert all(reader.are_seen(fingerprints(urls(range(14_000)))))


def test_no_room_to_grow(tmp_path: Path) -> None:
    """A filter that is full by far would take most pages for seen."""
    write_urls(tmp_path / "urls.txt", urls(range(20_000)))
    ran = bloom(
        *("import", "urls.txt", "filter", "-s", "BLOOM_EXPECTED_REQUESTS=2000"),
        cwd=tmp_path,
        under=["prlimit", "--fsize=100000"],
    )
    assert ran.status == 1
    assert "filter/bloom.sqlite cannot be used" in ran.err
    assert "fix that, and repeat the command" in ran.err
    assert ran.err.count("\n") == 1
    figures = bloom("info", "filter", "--json", cwd=tmp_path).json
    assert figures["error_rate_now"] < 1e-4
    assert bloom("import", "urls.txt", "filter", cwd=tmp_path).status == 0


def test_a_server_that_goes_away(tmp_path: Path) -> None:
    server, quick = servers.Server(), ("-s", "BLOOM_REDIS_DEADLINE_SECS=1")
    place = f"{server.url}?socket_timeout=10"  # one that is only slow is not away
    with half_given(tmp_path / "fifo") as give_the_rest:
        process = subprocess.Popen(
            [SCRAPY, "bloom", "import", "fifo", f"{place}#x", *quick],
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
    assert "fix that, and repeat the command" in err


@pytest.mark.parametrize("is_there", [False, True], ids=["refused", "silent"])
def test_a_command_does_not_wait_for_long(
    durable: servers.Server, tmp_path: Path, is_there: bool
) -> None:
    url = f"redis://:hushhush@127.0.0.1:{durable.port}/0"
    (tmp_path / "urls").write_text("https://shop.example/\n")
    if is_there:
        durable.pause()
    else:
        durable.kill()
    for arguments in (["info"], ["import", "urls"]):
        ran = bloom(*arguments, f"{url}#shop:bloom", cwd=tmp_path)
        assert "(waited up to 1.5 seconds, BLOOM_REDIS_DEADLINE_SECS)" in ran.error
        assert ran.err.count("\n") == 1
        assert "hushhush" not in ran.err
    if is_there:
        durable.go_on()


def test_a_failed_import_leaves_nothing(tmp_path: Path) -> None:
    write_urls(tmp_path / "urls.txt", urls(range(10)))
    before = sorted(tmp_path.rglob("*"))
    command = ("import", "urls.txt", "new/filter", "-s", "BLOOM_EXPECTED_REQUESTS=1M")
    ran = bloom(*command, cwd=tmp_path, under=["prlimit", "--fsize=20000"])
    assert "new/filter/bloom.sqlite cannot be used" in ran.error
    assert sorted(tmp_path.rglob("*")) == before


# Run as root of a namespace of its own, with a file system of that name.
READ_ONLY = ("unshare", "-rm", "sh", "-c", 'mount -t tmpfs -o ro tmpfs ro && exec "$@"', "sh")


@pytest.mark.skipif(
    subprocess.run(["unshare", "-rm", "true"], check=False, capture_output=True).returncode != 0,
    reason="namespaces are not allowed here",
)
def test_a_read_only_file_system(tmp_path: Path) -> None:
    write_urls(tmp_path / "urls.txt", urls(range(10)))
    (tmp_path / "ro").mkdir()
    error = bloom("import", "urls.txt", "ro", cwd=tmp_path, under=READ_ONLY).error
    assert "ro cannot be written to: Read-only file system; mount it for writing, or give" in error


def test_nothing_to_import_makes_no_filter(tmp_path: Path) -> None:
    (tmp_path / "comments").write_text("# nothing yet\n\n")
    (tmp_path / "job").mkdir()
    (tmp_path / "job/requests.seen").touch()
    for source in ("-", "comments", "job/requests.seen"):
        ran = bloom("import", source, "new", cwd=tmp_path)
        assert "holds nothing to import; nothing was changed" in ran.error
        assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["bloom.sqlite", "bloom.sqlite-wal", "requests.seen"])
def test_a_pipe_among_the_files_of_a_job(name: str, tmp_path: Path) -> None:
    """Nobody writes to it: whoever reads it, waits for ever."""
    write_urls(tmp_path / "urls.txt", urls(range(3)))
    make_filter(tmp_path / "job", fingerprints(urls(range(3))))
    pipe = tmp_path / "job" / name
    pipe.unlink(missing_ok=True)
    os.mkfifo(pipe)
    for command in ("info job", "import urls.txt job", "copy job new"):
        ran = bloom(*command.split(), cwd=tmp_path)
        if ran.status:  # else it has no need of that file
            assert name in ran.error
        else:
            assert name != "bloom.sqlite"
        assert pipe.is_fifo()


# The disk of such a process fails while there is a file of that name.
FAILING = """
import errno, os
fsync = os.fsync
def fails(fd):
    if not os.path.exists("fails"):
        return fsync(fd)
    raise OSError(errno.EIO, os.strerror(errno.EIO))
os.fsync = fails
from scrapy_bloom.job import file
file.SYNC_SECS = {}
"""


@pytest.mark.parametrize("sync_secs", [0.01, 3600], ids=["meanwhile", "in the end"])
def test_a_disk_that_fails(sync_secs: float, tmp_path: Path) -> None:
    """It is no full filter, and no crawl goes on; the command can be repeated."""
    make_filter(tmp_path / "filter", fingerprints(urls(range(3))), capacity=30_000)
    write_urls(tmp_path / "urls.txt", urls(range(20_000)))
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules/sitecustomize.py").write_text(FAILING.format(sync_secs))
    (tmp_path / "fails").touch()
    command = ("import", "urls.txt", "filter")
    failing = with_modules(tmp_path / "modules")
    ran = bloom(*command, cwd=tmp_path, under=failing)
    assert "filter/bloom.sqlite cannot be used: [Errno 5] Input/output error" in ran.error
    assert "requests were read; fix that, and repeat the command" in ran.error
    assert "full" not in ran.error
    assert "crawl" not in ran.error
    assert ran.err.count("\n") == 1
    (tmp_path / "fails").unlink()
    ran = bloom(*command, "--json", cwd=tmp_path)
    assert (ran.status, ran.json["read"]) == (0, 20_000)
    # What came while blocks were written may count twice.
    assert bloom("info", "filter", "--json", cwd=tmp_path).json["recorded"] > 19_500
