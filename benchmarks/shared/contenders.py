"""What else remembers fingerprints, each behind the same few lines as a user would write."""

import sqlite3
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from scrapy.dupefilters import RFPDupeFilter

from benchmarks.shared import peer_env
from benchmarks.shared.peer_env import PYBLOOM_LIVE, PYBLOOMFILTER, RBLOOM
from scrapy_bloom import BloomFilter
from scrapy_bloom.generations.policy import Origin, Policy
from scrapy_bloom.job.filter import LocalBackend

FILE, MEMORY = "LocalBackend, file", "BloomFilter, memory"
MMAP, RUST = f"{PYBLOOMFILTER}, file", f"{RBLOOM}, memory"
LIVE = f"{PYBLOOM_LIVE}, memory"
LIVE_SCALABLE = f"{PYBLOOM_LIVE}, scalable, memory"
SQLITE = "SQLite, file"
SEEN = "RFPDupeFilter, requests.seen"

SQLITE_COMMIT = 1_000
SQLITE_TEXT = (
    "SQLite: a table of the fingerprints alone (BLOB PRIMARY KEY, WITHOUT ROWID), INSERT OR "
    f"IGNORE, a commit every {SQLITE_COMMIT:,} requests, journal_mode WAL, synchronous NORMAL, and "
    "otherwise defaults"
)
RBLOOM_TEXT = (
    "rbloom takes a hash function: SHA-256 of the fingerprint, 16 bytes of it as an integer, which "
    "is its README's without the pickling. It does not tell what was new, so it is asked first"
)


@dataclass(frozen=True)
class Contender:
    """Something that remembers fingerprints, ready for use."""

    record: Callable[[Any], bool]  # remembers one, and tells whether it was new
    new: bool  # what `record` returns for a new one
    # whether one is there, if it can be asked without recording
    has: Callable[[bytes], bool] | None = None
    # leaves what there is to the next run, where that is possible
    end: Callable[[], object] = lambda: None

    def count_new(self, answers: int, asked: int) -> int:
        """How many were new, if so many answers were True."""
        return answers if self.new else asked - answers


Make = Callable[[Path, int, float], Contender]


def _ours_in_file(place: Path, capacity: int, error_rate: float) -> Contender:
    place.mkdir(parents=True, exist_ok=True)
    backend = LocalBackend(place, Policy(expected=capacity, error_rate=error_rate), Origin())
    backend.open()
    backend.begin()
    return Contender(backend.add, True, backend.__contains__, backend.close)


def _ours_in_memory(_place: Path, capacity: int, error_rate: float) -> Contender:
    seen = BloomFilter(capacity, error_rate)
    return Contender(seen.add, True, seen.__contains__)


def _pybloomfilter(place: Path, capacity: int, error_rate: float) -> Contender:
    kind = peer_env.module(PYBLOOMFILTER).BloomFilter
    place.mkdir(parents=True, exist_ok=True)
    seen = kind(capacity, error_rate, str(place / "filter.bloom"))
    return Contender(seen.add, False, seen.__contains__, seen.close)


def hash_of(fingerprint: bytes) -> int:
    """What rbloom's README recommends, for bytes."""
    return int.from_bytes(sha256(fingerprint).digest()[:16], sys.byteorder, signed=True)


def _rbloom(place: Path, capacity: int, error_rate: float) -> Contender:
    seen = peer_env.module(RBLOOM).Bloom(capacity, error_rate, hash_of)

    def end() -> None:
        place.mkdir(parents=True, exist_ok=True)
        seen.save(str(place / "filter.rbloom"))

    def record(fingerprint: bytes) -> bool:
        if fingerprint in seen:
            return False
        seen.add(fingerprint)
        return True

    return Contender(record, True, seen.__contains__, end)


def _pybloom_live(place: Path, capacity: int, error_rate: float) -> Contender:
    seen = peer_env.module(PYBLOOM_LIVE).BloomFilter(capacity, error_rate)

    def end() -> None:
        place.mkdir(parents=True, exist_ok=True)
        with (place / "filter.live").open("wb") as file:
            seen.tofile(file)

    return Contender(seen.add, False, seen.__contains__, end)


def _pybloom_live_scalable(_place: Path, capacity: int, error_rate: float) -> Contender:
    seen = peer_env.module(PYBLOOM_LIVE).ScalableBloomFilter(capacity, error_rate)
    return Contender(seen.add, False, seen.__contains__)


def _sqlite(place: Path, _capacity: int, _error_rate: float) -> Contender:
    connection = _connected(place)
    execute = connection.execute
    execute("BEGIN")
    since_commit = 0

    def record(fingerprint: bytes) -> bool:
        nonlocal since_commit
        since_commit += 1
        if since_commit >= SQLITE_COMMIT:
            since_commit = 0
            execute("COMMIT")
            execute("BEGIN")
        return execute("INSERT OR IGNORE INTO seen VALUES (?)", (fingerprint,)).rowcount == 1

    def end() -> None:
        execute("COMMIT")
        connection.close()

    return Contender(record, True, end=end)


def _connected(place: Path) -> sqlite3.Connection:
    place.mkdir(parents=True, exist_ok=True)
    connection = sqlite3.connect(place / "seen.sqlite", isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute("CREATE TABLE IF NOT EXISTS seen (fp BLOB PRIMARY KEY) WITHOUT ROWID")
    return connection


def fill_sqlite(place: Path, fingerprints: Iterable[bytes]) -> None:
    """Write many into a table at once: in order, which takes a fraction of the time."""
    connection = _connected(place)
    connection.execute("BEGIN")
    rows = ((fingerprint,) for fingerprint in sorted(fingerprints))
    connection.executemany("INSERT OR IGNORE INTO seen VALUES (?)", rows)
    connection.execute("COMMIT")
    connection.close()


class _Bare:
    """In place of a fingerprinter: the filter is given fingerprints, not requests."""

    def fingerprint(self, request: Any) -> bytes:
        return bytes(request)


def _requests_seen(place: Path, _capacity: int, _error_rate: float) -> Contender:
    place.mkdir(parents=True, exist_ok=True)
    seen = RFPDupeFilter(str(place), fingerprinter=_Bare())
    record: Any = seen.request_seen
    return Contender(record, False, end=lambda: seen.close("shutdown"))


_ALL: Mapping[str, tuple[str, Make]] = {
    FILE: ("", _ours_in_file),
    MEMORY: ("", _ours_in_memory),
    MMAP: (PYBLOOMFILTER, _pybloomfilter),
    RUST: (RBLOOM, _rbloom),
    LIVE: (PYBLOOM_LIVE, _pybloom_live),
    LIVE_SCALABLE: (PYBLOOM_LIVE, _pybloom_live_scalable),
    SQLITE: ("", _sqlite),
    SEEN: ("", _requests_seen),
}


def present(*names: str) -> list[str]:
    """Those of them that can be measured here."""
    return [name for name in names if _ALL[name][0] not in peer_env.missing()]


def imported(name: str) -> None:
    """Import what a contender consists of, which is not to be measured."""
    if package := _ALL[name][0]:
        peer_env.module(package)


def made(name: str, place: Path, capacity: int, error_rate: float) -> Contender:
    """A contender as new, or with what was left in that directory; nobody else may use it."""
    return _ALL[name][1](place, capacity, error_rate)
