"""Untrusted job directories, whose databases and records were made to harm their reader."""

import os
import signal
import sqlite3
import struct
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from scrapy_bloom import StorageError
from scrapy_bloom.job.jobdir import FILE
from scrapy_bloom.queues.store import State
from tests.support.cli import bloom
from tests.support.crawls import Crawl, run_script
from tests.support.request_queues import begun, counts_in, fill
from tests.support.workspace import fingerprints, make_filter, urls, write_urls

SIZE = 4096  # of a page
NOWHERE = "http://127.0.0.1:9/"
JOB = {"JOBDIR": "job", "SCHEDULER": "scrapy_bloom.CrashSafeScheduler"}
ENDLESS = """
    WITH RECURSIVE numbers(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers)
    SELECT n AS id, x'00' AS fingerprint, 0 AS in_flight FROM numbers
"""
TRIGGER = f"CREATE TRIGGER t AFTER {{}} BEGIN INSERT INTO more {ENDLESS}; END"
ALTERED = {
    "a view": ["DROP TABLE {0}", f"CREATE VIEW {{0}} AS {ENDLESS}"],
    "a view next to it": [f"CREATE VIEW another AS {ENDLESS}"],
    "a trigger": [
        "CREATE TABLE more (id, fingerprint, in_flight)",
        TRIGGER.format("INSERT ON {0}"),
    ],
    "a column": ["ALTER TABLE {0} ADD COLUMN more GENERATED ALWAYS AS (zeroblob(1000000000))"],
}


def alter(path: Path, statements: list[str]) -> bytes:
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA journal_mode = DELETE")
        for statement in statements:
            db.execute(statement.format("requests"))
        db.commit()
    return path.read_bytes()


def queue_of(job: Path) -> Path:
    job.mkdir(exist_ok=True)
    begun(job / FILE).close()
    return job / FILE


@pytest.mark.parametrize("use", [begun, counts_in], ids=["queue", "queue, to read"])
@pytest.mark.parametrize("statements", ALTERED.values(), ids=ALTERED)
def test_an_altered_database_is_refused(
    use: Callable[[Path], object],
    statements: list[str],
    tmp_path: Path,
) -> None:
    path = queue_of(tmp_path)
    before = alter(path, statements)
    with pytest.raises(StorageError, match="database of another program"):
        use(path)
    assert path.read_bytes() == before


def test_a_tree_of_pages_that_leads_back_to_its_root_is_refused(tmp_path: Path) -> None:
    path = queue_of(tmp_path / "job")
    fill(path, *[bytes(500) + bytes([number]) for number in range(100)])
    with closing(sqlite3.connect(path)) as db:
        (root,) = db.execute(
            "SELECT rootpage FROM sqlite_master WHERE name = 'requests'"
        ).fetchone()
    data = bytearray(path.read_bytes())
    begin = (root - 1) * 4096
    kind, _, number = struct.unpack_from(">BHH", data, begin)
    assert kind == 5  # it has no rows itself
    cells = struct.unpack_from(f">{number}H", data, begin + 12)
    for place in (8, *cells):
        struct.pack_into(">I", data, begin + place, root)
    path.write_bytes(data)
    error = bloom("queue", "job", cwd=tmp_path).error
    assert "cannot be used: database disk image is malformed" in error
    crawl = Crawl(NOWHERE, tmp_path, JOB)
    assert crawl.finish() < 2
    (error,) = crawl.our_lines("ERROR")
    assert "database disk image is malformed" in error


def lead_on(path: Path, name: str) -> None:
    """Have each page of a tree lead to the next one 100 times, so that it has 100^17 rows."""
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA journal_mode = DELETE")
        query = "SELECT rootpage, type FROM sqlite_master WHERE name = ?"
        root, kind = db.execute(query, (name,)).fetchone()
    data = bytearray(path.read_bytes())
    first = len(data) // SIZE + 1
    leaf = data[(root - 1) * SIZE : root * SIZE]
    assert leaf[0] == (13 if kind == "table" else 10)
    for level in range(17):
        number = root if level == 0 else first + level - 1
        page, end = bytearray(SIZE), SIZE
        # An inner page of an index has an entry of its own next to each child.
        (at,) = struct.unpack_from(">H", leaf, 8)
        entry = b"\1" if kind == "table" else bytes(leaf[at : at + leaf[at] + 1])
        for cell in range(100 if kind == "table" else 40):
            end -= 4 + len(entry)
            page[end : end + 4 + len(entry)] = struct.pack(">I", first + level) + entry
            struct.pack_into(">H", page, 12 + 2 * cell, end)
        head = 5 if kind == "table" else 2, 0, cell + 1, end, 0, first + level
        struct.pack_into(">BHHHBI", page, 0, *head)
        data[(number - 1) * SIZE : number * SIZE] = page
    data += leaf
    data[18:20] = 2, 2  # it has a write-ahead log
    struct.pack_into(">I", data, 28, len(data) // SIZE)
    path.write_bytes(data)


ENDLESS_TREES = {
    "info job": "generations",
    "report job -o page": "next",
    "queue job": "next",
    "queue job --failed": "kept",
    "queue job --requeue --yes": "kept",
    "queue job --drop-host  --yes": "next",
    "copy job copy": "ops",
    "import urls job": "ops",
    "reset job --queue --yes": "requests",
}


def endless_job(directory: Path, name: str, rows: int = 1) -> Path:
    path = queue_of(directory / "job")
    make_filter(directory / "job", fingerprints(urls(range(50))))
    fill(path, *[bytes([number]) for number in range(rows)])
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("INSERT INTO ops VALUES (1, 1, x'')")
        if name in ("kept", "pages"):
            db.execute(f"UPDATE requests SET state = {State.FAILED:d}, page = x'01'")
    begun(path).close()  # makes the index
    lead_on(path, name)
    assert path.stat().st_size < 200_000
    return path


@pytest.mark.parametrize("command", ENDLESS_TREES)
def test_a_tree_that_practically_never_ends_is_not_read_to_its_end(
    command: str, tmp_path: Path
) -> None:
    path = endless_job(tmp_path, ENDLESS_TREES[command])
    write_urls(tmp_path / "urls", urls(range(50, 60)))
    before = path.read_bytes()
    ran = bloom(*command.split(" "), cwd=tmp_path)
    assert len(ran.out) < 1_000_000
    if ran.status:
        assert "job/bloom.sqlite cannot be used: " in ran.error
        assert path.read_bytes() == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_query_that_goes_on_ends_at_ctrl_c(number: signal.Signals, tmp_path: Path) -> None:
    path = endless_job(tmp_path, "next")
    os.truncate(path, 1 << 33)  # so large that much more may be read
    data = bytearray(path.open("rb").read(100))
    struct.pack_into(">I", data, 28, (1 << 33) // SIZE)
    with path.open("r+b") as file:
        file.write(data)
    # The process interrupts itself once it is in the query, which would not end before.
    script = f"""
        import os, sys, threading
        from scrapy.cmdline import execute
        from scrapy_bloom.job import disk
        limit_steps = disk.limit_steps
        timer = threading.Timer(1.0, os.kill, (os.getpid(), {number:d}))
        def begin(*arguments):
            limit_steps(*arguments)
            if not timer.ident:
                timer.start()
        disk.limit_steps = begin
        execute(["scrapy", "bloom", "queue", "job"])
    """
    ran = run_script(script, cwd=tmp_path, prefix=("timeout", "100"))
    assert (ran.returncode, ran.stderr) == (
        -signal.SIGINT,
        "scrapy bloom: error: interrupted\n",
    )


VALUES = ["x'ff1b'", "CAST(x'ff1b' AS TEXT)", "1e999"]
COLUMNS = [
    *("requests.slot", "requests.priority", "requests.deaths", "requests.tries", "requests.reason"),
    *("requests.data", "requests.state", "requests.position", "requests.page"),
    "requests.packed_hops",
    *("requests.waits_for", "requests.first", "requests.takes", "requests.once"),
    *("requests.epoch", "requests.is_start", "ops.fingerprints"),
    *("blocks.bits", "generations.count", "filter.salt", "job.opened_as", "job.in_use"),
    *("job.spider", "job.run_name", "job.done", "job.ended_at", "job.num_rows"),
]


@pytest.mark.parametrize("column", COLUMNS)
def test_values_of_any_type_are_shown_or_refused(column: str, tmp_path: Path) -> None:
    path = queue_of(tmp_path / "job")
    make_filter(tmp_path / "job", fingerprints(urls(range(50))))
    table, name = column.split(".")
    fill(path, b"pending", b"dead")
    with closing(sqlite3.connect(path)) as db, db:
        query = "UPDATE requests SET state = ? WHERE id = (SELECT max(id) FROM requests)"
        db.execute(query, (State.FAILED,))
        db.execute("INSERT INTO ops VALUES (1, 1, x'')")
    commands = {
        "requests": ["queue job", "queue job --failed --dead"],
        "job": ["queue job", "info job --scan"],
    }.get(table, ["info job --scan"])
    for value in VALUES:
        with closing(sqlite3.connect(path)) as db, db:
            db.execute(f"UPDATE {table} SET {name} = {value}")
        for command in commands:
            ran = bloom(*command.split(), cwd=tmp_path)
            assert (ran.out + ran.err).replace("\n", "").isprintable()
            assert ran.status == 0 or "job/bloom.sqlite cannot be used: " in ran.error
