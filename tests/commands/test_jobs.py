"""Large lists are fingerprinted by several processes: nobody sees that, but by the clock."""

import gzip
import json
import os
import random
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from scrapy_bloom.commands.shared import list_formats, workers
from tests.support import servers
from tests.support.cli import SCRAPY, UNMEASURED, bloom
from tests.support.workspace import urls

# Its fingerprinter notes in which processes it works, and does what a file says there. No other
# process could import it.
SETTINGS = """
import os, signal, threading, time
from pathlib import Path
from scrapy.utils.request import RequestFingerprinter

HERE = Path(__file__).parent
if (HERE / "thread").exists():
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()

def local():
    class Own(RequestFingerprinter):
        def fingerprint(self, request):
            (HERE / "pids" / str(os.getpid())).touch()
            if request.url.endswith("fail"):
                raise LookupError("no such page")
            if request.url.endswith("number"):
                return 7
            if request.url.endswith("kill"):
                os.kill(os.getpid(), signal.SIGKILL)
            if request.url.endswith("sleep"):
                time.sleep(60)
            return super().fingerprint(request)
    return Own

REQUEST_FINGERPRINTER_CLASS = local()
"""
MANY = 10_000  # more than one chunk


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "scrapy.cfg").write_text("[settings]\ndefault = own\n")
    (tmp_path / "own.py").write_text(SETTINGS)
    (tmp_path / "pids").mkdir()
    return tmp_path


def long_urls(number: int) -> list[str]:
    return [f"https://www.shop.example/section/{n}/page-{n:06}.html" for n in range(number)]


def write(path: Path, lines: list[str]) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def processes(project: Path) -> int:
    found = list((project / "pids").iterdir())
    for each in found:
        each.unlink()
    return len(found)


def make_filter(project: Path) -> None:
    """One that holds every third of the long URLs."""
    write(project / "third.txt", long_urls(MANY)[::3])
    assert bloom("import", "third.txt", "filter", "--jobs", "1", cwd=project).status == 0
    assert processes(project) == 1


def test_the_same_in_every_format(project: Path) -> None:
    make_filter(project)
    rng, lines = random.Random(1), long_urls(MANY)
    bad = sorted(rng.sample(range(1, MANY), 20))
    for index in bad:
        lines[index] = f"no URL {index}"
    objects = [json.dumps({"n": n, "url": line}) for n, line in enumerate(lines)]
    rows = [f'"in {n}\n\nlines",{line}' for n, line in enumerate(lines)]
    lists = {
        "urls": ["# a comment", "", *lines],
        "jl": objects,
        "csv": ["title,url", *rows],
    }
    for form, content in lists.items():
        name = f"list.{form}"
        path = write(project / name, content)
        path.with_name(f"{name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        check = partial(bloom, "check", "filter", cwd=project)
        alone = check(name, "--jobs", "1")
        assert processes(project) == 1
        assert "20 lines are not URLs" in alone.error
        assert f"no URL {bad[0]}" in alone.error
        expected = [each for n, each in enumerate(lines) if n % 3 and n not in bad]
        assert alone.out.split("\n")[:-1] == expected
        for arguments, stdin in (
            ([name, "--jobs", "3"], ""),
            ([f"{name}.gz", "--jobs", "2"], ""),
            (["-", "--format", form, "--jobs", "3"], path.read_text()),
        ):
            ran = check(*arguments, stdin=stdin)
            assert processes(project) > 1
            assert (ran.status, ran.out) == (1, alone.out), arguments
            assert ran.err == alone.err, arguments
    run = partial(bloom, "import", "list.urls", "--format", "urls", "--json", cwd=project)
    figures = [run(f"new{jobs}", "--jobs", jobs).json for jobs in ("1", "3")]
    names = ("read", "new", "skipped", "recorded")
    assert [figures[0][name] for name in names] == [figures[1][name] for name in names]
    assert figures[0]["read"] == MANY - 20


def test_how_many_processes(project: Path) -> None:
    make_filter(project)
    large, small = write(project / "large.txt", long_urls(MANY)), ["urls.txt", "--jobs", "3"]
    write(project / "urls.txt", urls(range(1000)))
    check = partial(bloom, "check", "filter", cwd=project)
    assert check(*small).status == 0
    assert processes(project) == 1
    assert check(large, "--jobs", "3").status == 0
    assert processes(project) == 3
    assert check(large).status == 0
    cores = len(os.sched_getaffinity(0))
    assert processes(project) == min(cores, 3)  # so many chunks there are
    (project / "thread").touch()  # its locks would stay locked in another process
    assert check(large, "--jobs", "3").status == 0
    assert processes(project) == 1


@pytest.mark.parametrize("number", ["0", "-1", "1.5", "many", "257"])
def test_no_number_of_processes(number: str, tmp_path: Path) -> None:
    ran = bloom("check", "filter", "urls.txt", f"--jobs={number}", cwd=tmp_path)
    assert ran.status == 2
    assert "--jobs" in ran.err
    assert "whole number from 1 to 256" in ran.err


@pytest.mark.parametrize("end", ["fail", "number"])
def test_a_fingerprinter_that_fails(end: str, project: Path) -> None:
    """What stands before is recorded, and the message is the same."""
    lines = long_urls(MANY)
    lines[-10] = f"https://shop.example/{end}"
    write(project / "urls.txt", lines)
    told = []
    for jobs in ("1", "3"):
        ran = bloom("import", "urls.txt", f"new{jobs}", "--jobs", jobs, cwd=project)
        told.append(ran.error)
        ran = bloom("info", f"new{jobs}", "--json", cwd=project)
        assert ran.json["recorded"] >= MANY - 1010
    assert told[0] == told[1]
    assert "fingerprinter" in told[0]


def test_a_first_line_that_is_no_url(project: Path) -> None:
    write(project / "urls.txt", ["# " + 300_000 * "x", "www.shop.example", *long_urls(MANY)])
    run = partial(bloom, "import", "urls.txt", "new", "--format", "urls", cwd=project)
    told = {run("--jobs", jobs).error for jobs in ("1", "3")}
    assert len(told) == 1
    assert "urls.txt, line 2: Missing scheme" in told.pop()
    assert not (project / "new").exists()


def test_a_process_that_is_killed(project: Path) -> None:
    """As by a system that has no memory left."""
    lines = long_urls(MANY)
    lines[-10] = "https://shop.example/kill"
    write(project / "urls.txt", lines)
    ran = bloom("import", "urls.txt", "new", "--jobs", "2", cwd=project)
    assert "has died (signal 9)" in ran.error
    assert "--jobs 1" in ran.error
    assert "requests are recorded" in ran.error
    assert ran.err.count("\n") == 1
    processes(project)
    make_filter(project)
    ran = bloom("check", "filter", "urls.txt", "--jobs", "2", cwd=project)
    assert "has died (signal 9)" in ran.error
    assert ran.err.count("\n") == 1


@pytest.mark.parametrize("begin", [100, MANY])
def test_a_pipe_that_pauses(begin: int, project: Path) -> None:
    """What is read is answered, whether it was enough for several processes or not."""
    make_filter(project)
    process = subprocess.Popen(
        [SCRAPY, "bloom", "check", "filter", "-", "--jobs", "2"],
        cwd=project,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin
    assert process.stdout
    lines = [f"{each}\n".encode() for each in long_urls(2 * MANY)[1::3]]
    known = [f"{each}\n".encode() for each in long_urls(MANY)[::3]]
    is_over = threading.Event()

    def give() -> None:
        process.stdin.writelines([*known, *lines][:begin])
        process.stdin.flush()
        servers.wait_for(lambda: any((project / "pids").iterdir()), lambda: "nothing is read")
        process.stdin.writelines([*known, *lines][begin:])
        process.stdin.flush()
        is_over.wait(60)
        process.stdin.close()

    giving = threading.Thread(target=give, daemon=True)
    giving.start()
    out = b""
    missing = 1000 + 1  # a batch that is not full
    while out.count(b"\n") < len(lines) - missing:
        assert select.select([process.stdout], [], [], 60)[0]
        out += os.read(process.stdout.fileno(), 1 << 16)
    is_over.set()
    while data := os.read(process.stdout.fileno(), 1 << 16):
        out += data
    assert process.wait(60) == 0
    giving.join(60)
    process.stdout.close()
    assert out == b"".join(lines)


def test_a_pipe_that_never_pauses_but_is_slow() -> None:
    """Its beginning is not waited for until there is enough for several processes."""
    reading, writing = os.pipe()
    is_over = threading.Event()

    def give() -> None:
        with os.fdopen(writing, "wb", buffering=0) as file:
            for _ in range(1000):
                if is_over.wait(0.01):
                    break
                file.write(b"https://www.shop.example/\n")

    giving = threading.Thread(target=give, daemon=True)
    giving.start()
    with os.fdopen(reading, "rb") as file:
        begun = time.monotonic()
        data, is_all = list_formats._beginning(file)
        took = time.monotonic() - begun
        is_over.set()
        giving.join(60)
    assert took < 5
    assert data
    assert not is_all


def is_gone(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.parametrize("to_all", [True, False], ids=["a terminal's Ctrl-C", "a signal to one"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupt_leaves_no_process(
    number: signal.Signals, to_all: bool, project: Path
) -> None:
    """The list is a pipe that gives nothing more: each process waits."""
    os.mkfifo(project / "fifo")
    is_over = threading.Event()

    def give() -> None:
        with suppress(BrokenPipeError), (project / "fifo").open("w") as file:
            file.writelines(f"{each}\n" for each in long_urls(3 * MANY))
            file.flush()
            is_over.wait(60)

    threading.Thread(target=give, daemon=True).start()
    process = subprocess.Popen(
        [SCRAPY, "bloom", "import", "fifo", "new", "--jobs", "3", "-n", "1000"],
        cwd=project,
        env=UNMEASURED,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    )
    servers.wait_for(has_grown(project / "new"), lambda: "nothing is recorded")
    assert len(list((project / "pids").iterdir())) == 3
    (os.killpg if to_all else os.kill)(process.pid, number)
    _, err = process.communicate(timeout=60)
    is_over.set()
    servers.wait_for(lambda: is_gone(process.pid), lambda: "a process is left")
    assert process.returncode == (143 if number == signal.SIGTERM else -number)
    if number in (signal.SIGINT, signal.SIGTERM):
        assert "requests are recorded; repeat the command to go on" in err
        assert err.count("\n") == 2
    else:
        assert not err


def test_an_interrupt_waits_for_all_processes_together(project: Path) -> None:
    """Not for one after another: each is busy for a minute."""
    write(project / "urls.txt", 3 * MANY * ["https://www.shop.example/sleep"])
    make_filter(project)
    with subprocess.Popen(
        [SCRAPY, "bloom", "check", "filter", "urls.txt", "--jobs", "12"],
        cwd=project,
        env=UNMEASURED,
        stderr=subprocess.PIPE,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    ) as process:
        asleep = project / "pids"
        servers.wait_for(lambda: len(list(asleep.iterdir())) > 3, lambda: "nothing is read")
        begun = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert time.monotonic() - begun < 15
    assert err == b"scrapy bloom: error: interrupted\n"


def test_processes_that_cannot_be_started(project: Path) -> None:
    make_filter(project)
    write(project / "urls.txt", long_urls(MANY))
    command = ("check", "filter", "urls.txt", "--jobs", "100")
    ran = bloom(*command, cwd=project, under=["prlimit", "--nofile=80"])
    assert ran.status == 1
    assert "100 processes to compute fingerprints cannot be started: Too many open" in ran.err
    assert "--jobs 1, which" in ran.err
    assert ran.err.count("\n") == 1


def has_grown(path: Path) -> Callable[[], bool]:
    return lambda: len(list(path.glob("*.bloom"))) > 3


def test_a_system_that_does_not_tell_its_threads_has_no_workers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(workers, "_THREADS", tmp_path / "none")
    assert not workers.can_fork()


def test_the_cores_of_a_system_that_cannot_restrict_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 1 <= workers.available_cores() <= (os.cpu_count() or 1)
    monkeypatch.delattr(os, "sched_getaffinity")
    assert workers.available_cores() == os.cpu_count()
