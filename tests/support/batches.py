"""Batches of a job's database, the same in each run; processes that die while they store them."""

import itertools
import os
import random
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from scrapy_bloom.files.log import pack_fingerprints
from scrapy_bloom.queues.database import IN_FLIGHT, REPEATED, JobDatabase
from scrapy_bloom.queues.store import Entered

BATCHES = 14
_OPERATIONS = "pwrite64,fsync,fdatasync,ftruncate,unlink"
_MOST_OPERATIONS = 400


class Counts(NamedTuple):
    seq: int
    applied: int
    left: int


Snapshot = tuple[Counts, tuple[Any, ...], tuple[Any, ...]]  # the rows with their hops, and the log


def begun(path: Path) -> JobDatabase:
    """Open the database of a job."""
    database = JobDatabase(path, by_slot=False)
    database.begin()
    return database


def run_batches(database: JobDatabase) -> Iterator[None]:
    """Store batches without an end: at first a mixture, then as many that enter as are done."""
    rng = random.Random(27)
    taken: list[int] = []
    for number in itertools.count():
        is_steady = number >= BATCHES // 2
        entered = [
            Entered(
                b"request %d of batch %d" % (each, number) + bytes(rng.choice((0, 300, 600))),
                fingerprint=b"page %d of batch %d" % (each, number),
                priority=rng.randrange(3),
                newest_first=False,
            )
            for each in range(1 if is_steady else rng.randrange(8))
        ]
        done = taken[:1] if is_steady else taken[::2]
        taken = taken[1:] if is_steady else taken[1::2]
        with database.transaction(is_batch=True) as changes:
            changes.insert([changes.new_row(each) for each in entered])
            if entered:
                changes.record([each.fingerprint or b"" for each in entered])
            rows = [changes.get(id_) for id_ in (*done, *taken)]
            for row in rows[: len(done)]:
                assert row
                assert row.state == IN_FLIGHT
                changes.remove(row)
            if number % 3 == 0 and taken and (row := rows[-1]):  # one is tried again, or redirected
                del taken[-1]
                position = changes.next_position(newest_first=False)
                hops = row.hops + pack_fingerprints([b"hop %d" % number])
                if number % 2:
                    changes.try_again(row, 1)
                else:
                    changes.change(row, state=REPEATED, position=position, hops=hops)
            query = "SELECT id FROM requests WHERE state < 1 ORDER BY priority DESC, rank, position"
            if found := changes.execute(query).fetchone():
                query = "UPDATE requests SET state = ?, takes = takes + 1 WHERE id = ?"
                changes.execute(query, (IN_FLIGHT, *found))
                taken += found
        yield


def _run_a_few(database: JobDatabase) -> Iterator[None]:
    for number, _ in enumerate(itertools.islice(run_batches(database), BATCHES)):
        yield
        if number % 4 == 3:
            database.checkpointed(database.seq)  # what the thread that syncs does


def snapshot(path: Path) -> Snapshot:
    """All that a database holds, without what each run has of its own."""
    database = sqlite3.connect(path)
    try:
        run = database.execute
        counts = Counts(*run(f"SELECT {', '.join(Counts._fields)} FROM job").fetchone())
        number = run("SELECT count(*) FROM requests").fetchone()[0]
        assert number == counts.left
        hops = run("SELECT * FROM hops ORDER BY id, page")
        return (
            counts,
            (*run("SELECT * FROM requests ORDER BY id"), *hops),
            tuple(run("SELECT * FROM ops ORDER BY seq")),
        )
    finally:
        database.close()


def snapshots(directory: Path) -> list[Snapshot]:
    """What a database holds at the beginning, after each batch, and once it is closed."""
    path = directory / "requests.sqlite"
    database = begun(path)
    found = [snapshot(path)]
    found += [snapshot(path) for _ in _run_a_few(database)]
    database.close()
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
    program = "import batches; batches._die_again_and_again()"
    # Coverage would write its own files in these processes.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("COVERAGE_")}
    subprocess.run(
        [strace, *options, sys.executable, "-c", program, directory],
        env=environment | {"PYTHONPATH": os.fspath(Path(__file__).parent)},
        timeout=300,
        check=True,
    )
    return sorted(directory.iterdir())


def _die_again_and_again() -> None:
    """Fork processes. The tracer counts their operations, and kills each at the same number."""
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
            database = begun(directory / "requests.sqlite")
            for _ in _run_a_few(database):
                pass
            database.close()
            os._exit(0)
    raise RuntimeError("there are more operations than that")
