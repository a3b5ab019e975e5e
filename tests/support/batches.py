"""Batches of a job, the same in each run; processes that die while they store them."""

import itertools
import os
import random
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scrapy_bloom.job import filter as module
from scrapy_bloom.queues.sqlite_store import SQLiteStore
from scrapy_bloom.queues.store import Batch, End, Ended, Entered, Taken
from tests.support.backends import local_backend
from tests.support.request_queues import SHOP

BATCHES = 14
FILE = "bloom.sqlite"
_OPERATIONS = "pwrite64,fsync,fdatasync,ftruncate,unlink"
_MOST_OPERATIONS = 400

Snapshot = tuple[tuple[Any, ...], ...]  # figures, and the rows with their hops


def begun(path: Path) -> SQLiteStore:
    """Open a job with a small filter, which grows."""
    backend = local_backend(path.parent, capacity=30, error_rate=1e-9)
    store = SQLiteStore(path, backend)
    store.open(SHOP)
    return store


def pages_of(number: int) -> list[bytes]:
    """Return the pages that a batch records."""
    is_steady = number >= BATCHES // 2
    rng = random.Random(number)
    return [b"%d of batch %d" % (n, number) for n in range(1 if is_steady else rng.randrange(8))]


def run_batches(store: SQLiteStore) -> Iterator[None]:
    """Store batches without an end: at first a mixture, then as many that enter as are done."""
    taken: list[Taken] = []
    for number in itertools.count():
        rng = random.Random(number)
        entered = [
            Entered(
                b"request " + page + bytes(rng.choice((0, 300, 600))),
                fingerprint=page,
                priority=rng.randrange(3),
                newest_first=False,
            )
            for page in pages_of(number)
        ]
        done = taken[:1] if number >= BATCHES // 2 else taken[::2]
        taken = [each for each in taken if each not in done]
        ended = [Ended(each.id) for each in done]
        if number % 3 == 0 and taken:  # one is redirected, or fails
            last = taken.pop()
            if number % 2:
                ended.append(Ended(last.id, End.FAILED, "503"))
            else:
                hop = b"hop %d" % number
                entered.append(Entered(hop, fingerprint=hop, replaces=last.id))
        taken += store.apply(Batch(entered, ended=ended, want=1)).taken
        yield


def _run_a_few(store: SQLiteStore) -> Iterator[None]:
    for number, _ in enumerate(itertools.islice(run_batches(store), BATCHES)):
        yield
        if number % 4 == 3:
            store._database.file._sync_all()  # what the thread that syncs does


def snapshot(path: Path) -> Snapshot:
    """Return the queue of a job."""
    database = sqlite3.connect(path)
    try:
        run = database.execute
        figures = run("SELECT seq, left, done, position FROM job").fetchone()
        assert run("SELECT count(*) FROM requests").fetchone()[0] == figures[1]
        hops = run("SELECT * FROM hops ORDER BY id, page")
        return figures, *run("SELECT * FROM requests ORDER BY id"), *hops
    finally:
        database.close()


def snapshots(directory: Path) -> list[Snapshot]:
    """Return the queue of a job at the beginning, after each batch, and once it is closed."""
    path = directory / FILE
    store = begun(path)
    found = [snapshot(path)]
    found += [snapshot(path) for _ in _run_a_few(store)]
    store.close()
    return [*found, snapshot(path)]


def killed_at_operations(directory: Path) -> list[Path]:
    """Have processes apply the batches, and kill them at every second operation of a file.

    Each run takes one half of the operations. Return the directories that they left, in order.
    """
    directory.mkdir()
    operations = f"inject={_OPERATIONS}:signal=SIGKILL:when={_MOST_OPERATIONS}"
    strace = shutil.which("strace")
    assert strace
    options = ["-f", "-qq", "-o", os.devnull, "-e", f"trace={_OPERATIONS}", "-e", operations]
    program = "from tests.support import batches; batches._die_again_and_again()"
    # Coverage would write its own files in these processes.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("COVERAGE_")}
    subprocess.run(
        [strace, *options, sys.executable, "-c", program, directory],
        env=environment | {"PYTHONPATH": os.fspath(Path(__file__).parents[2])},
        timeout=300,
        check=True,
    )
    return sorted(directory.iterdir())


def _die_again_and_again() -> None:
    """Fork processes. The tracer counts their operations, and kills each at the same number."""
    module._LEAST_ROUND = 10
    with Path(os.devnull).open("wb") as nothing:
        for number in range(random.randint(1, 2), _MOST_OPERATIONS, 2):
            directory = Path(sys.argv[1], f"{number:03}")
            directory.mkdir()
            if pid := os.fork():
                if os.waitpid(pid, 0)[1] == 0:  # it had no operation of that number
                    return
                continue
            for _ in range(_MOST_OPERATIONS - number):
                os.pwrite(nothing.fileno(), b"", 0)
            store = begun(directory / FILE)
            for _ in _run_a_few(store):
                pass
            store.close()
            os._exit(0)
    raise RuntimeError("there are more operations than that")
