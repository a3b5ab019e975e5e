"""Untrusted job directories, whose databases and records were made to harm their reader."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from scrapy_bloom.files.forgotten import NAME, ForgottenFile
from scrapy_bloom.queues.sqlite import RequestDatabase
from tests.support.cli import bloom
from tests.support.crawls import Crawl
from tests.support.workspace import fingerprints, make_filter, urls

NOWHERE = "http://127.0.0.1:9/"
JOB = {"JOBDIR": "job", "SCHEDULER": "scrapy_bloom.CrashSafeScheduler"}
ENDLESS = """
    WITH RECURSIVE numbers(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers)
    SELECT n AS id, x'00' AS fingerprint, 0.0 AS forgotten_at, 0 AS in_flight FROM numbers
"""
TRIGGER = f"CREATE TRIGGER t AFTER {{}} BEGIN INSERT INTO more {ENDLESS}; END"
ALTERED = {
    "a view": ["DROP TABLE {0}", f"CREATE VIEW {{0}} AS {ENDLESS}"],
    "a view next to it": [f"CREATE VIEW another AS {ENDLESS}"],
    "a trigger": [
        "CREATE TABLE more (id, fingerprint, forgotten_at, in_flight)",
        TRIGGER.format("INSERT ON {0}"),
    ],
    "a column": ["ALTER TABLE {0} ADD COLUMN more GENERATED ALWAYS AS (zeroblob(1000000000))"],
}


@pytest.fixture(params=ALTERED)
def statements(request: pytest.FixtureRequest) -> list[str]:
    return ALTERED[request.param]


def alter(path: Path, table: str, statements: list[str]) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA journal_mode = DELETE")
        for each in statements:
            db.execute(each.format(table))
        db.commit()


def test_a_hostile_set_of_forgotten_requests_is_refused(
    statements: list[str], tmp_path: Path
) -> None:
    make_filter(tmp_path / "filter", fingerprints(urls(range(50))))
    path = tmp_path / "filter" / NAME
    with closing(ForgottenFile(path)) as file:
        file.add(fingerprints(urls([1])))
    alter(path, "forgotten", statements)
    before = path.read_bytes()
    for command in (["info", "filter"], ["check", "filter", "-"], ["forget", "filter", *urls([2])]):
        ran = bloom(*command, cwd=tmp_path, stdin=urls([1])[0])
        assert "it is the database of another program" in ran.error
    crawl = Crawl(NOWHERE, tmp_path, {"BLOOM_DIR": "filter"})
    assert crawl.finish() != 0
    assert "it is the database of another program" in crawl.our_lines("ERROR")[0]
    assert path.read_bytes() == before


def test_a_hostile_queue_is_refused(statements: list[str], tmp_path: Path) -> None:
    make_filter(tmp_path / "job/bloom", fingerprints(urls(range(50))))
    path = tmp_path / "job/requests.sqlite"
    RequestDatabase(path, by_slot=True).close()
    alter(path, "requests", statements)
    before = path.read_bytes()
    for command in (["info", "job"], ["push", "job", "redis://127.0.0.1:9/0", "--key", "k"]):
        ran = bloom(*command, cwd=tmp_path)
        assert command[0] == "push" or "is a database of another program" in ran.error
        assert ran.status == 1
    for settings in (JOB, {"JOBDIR": "job"}):
        crawl = Crawl(NOWHERE, tmp_path, settings)
        assert crawl.finish() != 0
        assert "is a database of another program" in crawl.our_lines("ERROR")[0]
    assert path.read_bytes() == before


def test_a_logs_json_that_is_too_long_is_refused(tmp_path: Path) -> None:
    make_filter(tmp_path / "job/bloom", fingerprints(urls(range(50))))
    path = tmp_path / "job/bloom/logs.json"
    with path.open("wb") as file:
        file.truncate(700 << 20)
    error = Crawl(NOWHERE, tmp_path, JOB).refusal()
    assert "logs.json cannot be read: it is longer than 33,554,432 bytes; it was left as" in error
    limit = ("sh", "-c", 'ulimit -v 1000000; exec "$@"', "sh")  # KiB
    ran = bloom("import", "-", "job", cwd=tmp_path, under=limit, stdin=urls([1])[0])
    assert "logs.json cannot be read: it is longer than" in ran.error
    assert path.stat().st_size == 700 << 20
