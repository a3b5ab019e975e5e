"""Untrusted job directories, whose databases and records were made to harm their reader."""

import sqlite3
import struct
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from scrapy_bloom import StorageError
from scrapy_bloom.job.jobdir import FILE
from scrapy_bloom.queues.rows import FAILED
from tests.support.cli import bloom
from tests.support.crawls import Crawl
from tests.support.request_queues import begun, counts_in, fill
from tests.support.workspace import fingerprints, make_filter, urls

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
        for each in statements:
            db.execute(each.format("requests"))
        db.commit()
    return path.read_bytes()


def queue_of(job: Path) -> Path:
    job.mkdir(exist_ok=True)
    begun(job / FILE, by_slot=True).close()
    return job / FILE


@pytest.mark.parametrize(
    "use", [partial(begun, by_slot=True), counts_in], ids=["queue", "queue, to read"]
)
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
    assert (
        "cannot be used: database disk image is malformed"
        in bloom("queue", "job", cwd=tmp_path, under=("timeout", "60")).error
    )
    crawl = Crawl(NOWHERE, tmp_path, JOB)
    assert crawl.finish() < 2
    (error,) = crawl.our_lines("ERROR")
    assert "database disk image is malformed" in error


VALUES = ["x'ff1b'", "'a\x1b'", "CAST(x'ff' AS TEXT)", "1e999"]
COLUMNS = [
    *("requests.slot", "requests.priority", "requests.deaths", "requests.tries", "requests.reason"),
    *("requests.data", "requests.state", "requests.position", "requests.page", "requests.hops"),
    *("requests.waits_for", "requests.first", "requests.takes", "requests.once"),
    *("requests.epoch", "requests.is_start", "ops.fingerprints", "ops.hand"),
    *("blocks.bits", "generations.count", "filter.salt", "job.opened_as", "job.in_use"),
    *("job.spider", "job.run_name", "job.done", "job.ended_at", "job.left"),
]


@pytest.mark.parametrize("column", COLUMNS)
def test_values_of_any_type_are_shown_or_refused(column: str, tmp_path: Path) -> None:
    path = queue_of(tmp_path / "job")
    make_filter(tmp_path / "job", fingerprints(urls(range(50))))
    table, name = column.split(".")
    fill(path, b"pending", b"dead")
    with closing(sqlite3.connect(path)) as db, db:
        db.execute(
            f"UPDATE requests SET state = {FAILED} WHERE id = (SELECT max(id) FROM requests)"
        )
        db.execute("INSERT INTO ops VALUES (1, 1, 0.0, 0, x'')")
    for value in VALUES:
        with closing(sqlite3.connect(path)) as db, db:
            db.execute(f"UPDATE {table} SET {name} = {value}")
        for options in (["queue"], ["queue", "--failed", "--dead"], ["info", "--scan"]):
            ran = bloom(options[0], "job", *options[1:], cwd=tmp_path)
            assert (ran.out + ran.err).replace("\n", "").isprintable()
            assert ran.status == 0 or "job/bloom.sqlite cannot be used: " in ran.error
