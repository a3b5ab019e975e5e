"""`scrapy bloom info --watch` and `--format prometheus`, of crawls that run."""

import json
import os
import re
import signal
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from scrapy_bloom.queues.store import State
from tests.support import servers
from tests.support.cli import UNMEASURED, bloom
from tests.support.crawls import Crawl
from tests.support.processes import start_scrapy
from tests.support.request_queues import InRedis
from tests.support.shared_crawls import PAGES, SharedCrawl
from tests.support.sites import Site
from tests.support.workspace import fingerprints, make_filter, urls

SAFE = {"SCHEDULER": "scrapy_bloom.CrashSafeScheduler"}


class Watch:
    """A watch that runs: in a terminal of that width, or with its output in a file."""

    def __init__(self, *place: Any, cwd: Path, columns: int = 0, **env: str) -> None:
        import fcntl  # here, since other tests run on Windows, too
        import pty
        import struct
        import termios

        if columns:
            self.controller, written = pty.openpty()
            fcntl.ioctl(written, termios.TIOCSWINSZ, struct.pack("4H", 50, columns, 0, 0))
            os.set_blocking(self.controller, False)
            stream = os.fdopen(written, "wb", buffering=0)
        else:
            self.controller, stream = 0, TemporaryFile(dir=cwd)  # noqa: SIM115 - closed below
        self.stream = stream
        self.output = b""
        environ = {**UNMEASURED, "TERM": "xterm", **env}
        environ.pop("COLUMNS", None)
        self.process = start_scrapy(
            ["bloom", "info", *map(str, place)],
            cwd=cwd,
            given=stream,
            out=stream,
            err=stream,
            env=environ,
            prefix=["env"],  # so that Python itself ends after Ctrl-C
        )

    @property
    def text(self) -> str:
        if self.controller:
            try:
                while some := os.read(self.controller, 65536):
                    self.output += some
            except OSError:
                pass
        else:
            self.output = os.pread(self.stream.fileno(), 10_000_000, 0)
        return self.output.decode()

    @property
    def plain(self) -> str:
        """The text without the terminal's control sequences."""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.text)

    @property
    def lines(self) -> list[Any]:
        return [json.loads(line) for line in self.text.splitlines() if line.startswith("{")]

    def wait_for(self, *patterns: str) -> None:
        servers.wait_for(
            lambda: all(re.search(pattern, self.plain) for pattern in patterns),
            lambda: f"{patterns} are not in {self.plain[-2000:]}",
        )

    def interrupt(self) -> None:
        os.kill(self.process.pid, signal.SIGINT)
        self.wait_for_end(-signal.SIGINT)
        assert b"scrapy bloom: error: interrupted" in self.output

    def wait_for_end(self, status: int = 0) -> None:
        def has_ended() -> bool:
            _ = self.text  # a process whose terminal is full would wait for a reader, and not end
            return self.process.status() is not None

        servers.wait_for(has_ended, lambda: self.text)
        assert self.process.status() == status
        assert "Traceback" not in self.text
        self.stream.close()
        if self.controller:
            os.close(self.controller)


def test_each_worker_and_the_queue(wide: Site, tmp_path: Path) -> None:
    crawl = SharedCrawl(wide, tmp_path, CONCURRENT_REQUESTS=4, BLOOM_QUEUE_LEASE_SECS=20)
    crawl.hold(20)
    watch = Watch(*crawl.place, "--watch", "0.2", "--json", cwd=tmp_path)

    def is_still() -> bool:
        return bool(watch.lines) and watch.lines[-1]["queue"]["done_per_second"] == 0

    servers.wait_for(is_still, lambda: watch.text)
    figures = watch.lines[-1]
    queue, state = figures["queue"], crawl.state()
    assert 0 < figures["error_rate_now"] < 1
    assert 0 < figures["fill_ratio"] < 1
    assert (queue["pending"], queue["done"]) == (crawl.count(), state.done)
    assert {entry["name"].rpartition(":")[2] for entry in queue["workers"]} == {
        str(worker.pid) for worker in crawl.workers
    }
    assert sum(entry["done"] for entry in queue["workers"]) == queue["done"] > 0
    assert all(0 <= entry["heartbeat_secs"] < 20 for entry in queue["workers"])
    crawl.finish()
    servers.wait_for(lambda: watch.lines[-1]["queue"]["ended_at"], lambda: watch.text)
    assert watch.lines[-1]["queue"]["done"] >= PAGES
    assert max(line["queue"]["done_per_second"] or 0 for line in watch.lines) > 0
    watch.wait_for_end()


def test_a_watch_goes_on_after_a_restart(
    wide: Site, durable: servers.Server, tmp_path: Path
) -> None:
    crawl = SharedCrawl(wide, tmp_path, server=durable)
    crawl.hold(20)
    watch = Watch(*crawl.place, "--watch", "0.2", cwd=tmp_path)
    watch.wait_for(r"\d pending, \d+ in flight; \d+ done; 0\.0 pages/s\n", " s ago")
    durable.kill()
    watch.wait_for("no figures: .*cannot be used.*; trying again")
    durable.start()
    after = len(watch.text)
    servers.wait_for(lambda: " in flight" in watch.text[after:], lambda: watch.text)
    crawl.finish()
    watch.wait_for("; ended at ")
    watch.wait_for_end()


def test_a_job(tree: Site, tmp_path: Path) -> None:
    job = tmp_path / "job"
    crawl = Crawl.held(tree, 20, tmp_path, {**SAFE, "JOBDIR": job})
    watch = Watch(job, "--watch", "0.2", cwd=tmp_path, columns=100)
    watch.wait_for(r"worker +in flight", rf":{crawl.pid} +\d+ +valid", r"0\.0 pages/s")
    watch.wait_for(r"run +began")
    servers.wait_for(lambda: watch.text.count("\x1b[2J") > 1, lambda: watch.text)
    plain = Watch(job, "--watch", "0.2", "--json", cwd=tmp_path)
    stopped = Watch(job, "--watch", "0.2", cwd=tmp_path)
    stopped.wait_for("pages/s")
    stopped.interrupt()
    servers.wait_for(lambda: plain.lines, lambda: plain.text)
    before = plain.lines[0]["queue"]
    assert before["done"] >= 20 - before["in_flight"]
    tree.release()
    assert crawl.finish() == 0
    servers.wait_for(lambda: plain.lines[-1]["queue"]["done"] == tree.total(), lambda: plain.text)
    after = plain.lines[-1]["queue"]
    assert (after["pending"], after["in_flight"]) == (0, 0)
    watch.wait_for_end()
    plain.wait_for_end()


def test_prometheus_of_workers_with_one_name(tmp_path: Path) -> None:
    """In containers, the host and the process may have the same names; a series is there once."""
    there = InRedis("valkey", str(tmp_path))
    stores = [there.open(), there.open()]
    metrics = bloom("info", f"{there.url}#{there.key}", "--format", "prometheus", cwd=tmp_path)
    up = parsed(metrics.out)["scrapy_bloom_worker_is_alive"]
    assert len({labels["worker"] for labels, _ in up}) == 1
    assert len(up) == len(stores)
    there.end()


def parsed(text: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    """The samples of each metric; as the documentation of Prometheus has the format."""
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    assert text.endswith("\n")
    for line in text.splitlines():
        match = re.fullmatch(r'([a-z_]+)\{((?:[a-z]+="(?:[^"\\\n]|\\[\\"n])*",?)+)\} (\S+)', line)
        assert match, line
        labels = dict(re.findall(r'([a-z]+)="((?:[^"\\]|\\.)*)"', match[2]))
        assert match[1] not in [*found][:-1], "all samples of a metric are together"
        others = found.setdefault(match[1], [])
        assert labels not in [other for other, _ in others], "its collector refuses the file"
        others.append((labels, float(match[3])))
    return found


def test_prometheus_of_a_shared_crawl(wide: Site, tmp_path: Path) -> None:
    crawl = SharedCrawl(wide, tmp_path, CONCURRENT_REQUESTS=4)
    crawl.hold(20)
    before = None
    # What was answered before is being finished, and the workers take more.
    while before != ((state := crawl.state()).done, state.counts):
        before = state.done, state.counts
        found = parsed(bloom("info", *crawl.place, "--format", "prometheus", cwd=tmp_path).out)
    ((labels, pending),) = found["scrapy_bloom_pending"]
    assert crawl.key in labels["filter"]
    assert pending == state.counts[State.PENDING]
    assert found["scrapy_bloom_done"][0][1] == state.done
    up = found["scrapy_bloom_worker_is_alive"]
    assert {entry["worker"] for entry, _ in up} == {worker.name for worker in state.workers}
    assert [value for _, value in up] == [1, 1]
    assert 0 < found["scrapy_bloom_error_rate_now"][0][1] < 1
    crawl.finish()


def test_prometheus_of_a_filter_with_a_strange_name(tmp_path: Path) -> None:
    directory = tmp_path / 'a "b\\c\nd'
    make_filter(directory, fingerprints(urls(range(10))))
    found = parsed(bloom("info", directory, "--format", "prometheus", cwd=tmp_path).out)
    ((labels, recorded),) = found["scrapy_bloom_recorded"]
    assert labels["filter"].endswith(r"a \"b\\c\\nd")
    assert recorded == 10
    assert "scrapy_bloom_pending" not in found
