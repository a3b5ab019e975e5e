"""The inbox of a job, `inbox.sqlite`: what commands want from its crawl.

Only the crawl may change its file and its filter. So a command adds messages to a second, small
database of the job: requests to queue, and changes of the queue. The crawl looks for them twice a
second, or when it is resumed. It removes a message once what it asks for is stored. If it is killed
before that, the next run does it again. Its filter drops the requests that were queued already,
except requests with `dont_filter`, which are queued twice.
"""

import contextlib
import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.job import disk
from scrapy_bloom.job.file import transaction
from scrapy_bloom.queues.rows import MOVABLE
from scrapy_bloom.queues.store import State

_FILE = "inbox.sqlite"
# A message is a request or a move, as JSON.
_SCHEMA = "CREATE TABLE messages (id INTEGER PRIMARY KEY, is_request INTEGER, contents BLOB)"
_PATIENCE_SECS = 30.0  # how long to wait for another process that writes
_ATTEMPTS = 5  # to read it without changes, while other processes open and close it
_MOST_MESSAGES, _MOST_BYTES = 1000, 1 << 20  # that are read at once
VALUES = {  # of a request
    "url": str,
    "callback": str | None,
    "priority": int,
    "dont_filter": bool,
    "method": str,
    "body": str,
    "headers": dict,
    "meta": dict,
    "cb_kwargs": dict,
}


class Move(NamedTuple):
    """A change of the queue, with the arguments of `Queue.move`."""

    state: State
    to: State | None
    slot: str | None = None


Message: TypeAlias = dict[str, Any] | Move  # a request in the form of `Request.to_dict`


def inbox_files(job_dir: Path) -> tuple[Path, Path, Path]:
    """Return the paths of the inbox of a job, its write-ahead log, and the index of the log."""
    file = job_dir / _FILE
    return (file, *disk.log_and_index(file))


def state_of(job_dir: Path) -> object:
    """Return a value that changes with the inbox of a job, and costs two calls of the system."""
    found = []
    for file in inbox_files(job_dir)[:2]:
        with contextlib.suppress(OSError):  # usually, there is none
            status = file.lstat()
            found.append((status.st_ino, status.st_size, status.st_mtime_ns))
    return found


def add(job_dir: Path, messages: Iterable[Mapping[str, Any] | Move]) -> int:
    """Add messages for the crawl of a job; return the id of the last one.

    Of the values of a request, the crawl gets `VALUES`. Raises StorageError.
    """
    last = 0
    with _opened(job_dir) as db, transaction(db):
        for message in messages:
            contents: Any
            if is_request := not isinstance(message, Move):
                contents = {name: _text(message[name]) for name in VALUES}
            else:
                contents = message
            values = is_request, json.dumps(contents).encode()
            query = "INSERT INTO messages (is_request, contents) VALUES (?, ?)"
            last = db.execute(query, values).lastrowid or 0
    return last


def _text(value: Any) -> Any:
    """Return a value of a request with texts in place of bytes, as its list had it."""
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, dict):
        return {_text(name): _text(element) for name, element in value.items()}
    return [_text(element) for element in value] if isinstance(value, list) else value


def read(job_dir: Path, *, only_moves: bool = False) -> list[tuple[int, Message | None]]:
    """Return the first messages with their ids; None in place of a damaged one.

    Of an untrusted file, nothing but the values of a command comes through. Raises StorageError.
    """
    where = "WHERE NOT is_request" if only_moves else ""
    query = f"SELECT id, contents FROM messages {where} ORDER BY id LIMIT ?"  # noqa: S608 - constants
    found: list[tuple[int, Message | None]] = []
    size = 0
    with _opened(job_dir) as db:
        for id_, contents in db.execute(query, (_MOST_MESSAGES,)):
            found.append((id_, _parsed(contents)))
            size += len(contents) if isinstance(contents, bytes) else 0
            if size > _MOST_BYTES:
                break
    return found


def remove(job_dir: Path, ids: Sequence[int]) -> None:
    """Remove messages; raises StorageError."""
    with _opened(job_dir) as db, transaction(db):
        db.executemany("DELETE FROM messages WHERE id = ?", ((id_,) for id_ in ids))


def count_handed_over(job_dir: Path) -> int:
    """Return how many requests are in the inbox of a job, without a change; raises StorageError."""
    file = job_dir / _FILE
    for attempt in range(_ATTEMPTS if file.exists() else 0):
        try:
            with _explained(file), contextlib.closing(disk.connect_readonly(file)) as db:
                if not _has_messages(db):
                    break
                query = "SELECT count(*) FROM messages WHERE is_request"
                return int(db.execute(query).fetchone()[0])
        except StorageError:
            if attempt + 1 == _ATTEMPTS:
                raise
    return 0


def _parsed(contents: Any) -> Message | None:
    """Return the message in untrusted contents, or None."""
    try:
        found = json.loads(contents)
    except (ValueError, TypeError, RecursionError):
        return None
    match found:
        case {**values} if all(
            name in values and isinstance(values[name], kind) for name, kind in VALUES.items()
        ):
            return {name: values[name] for name in VALUES}
        case [int(state), int() | None as to, str() | None as slot]:
            with contextlib.suppress(ValueError):
                move = Move(State(state), None if to is None else State(to), slot)
                if move.state in MOVABLE and move.to in {None, State.PENDING} - {move.state}:
                    return move
    return None


@contextlib.contextmanager
def _opened(job_dir: Path) -> Iterator[sqlite3.Connection]:
    """Open the inbox of a job for writing in a `with` block, and make it if there is none."""
    file = job_dir / _FILE
    with _explained(file):
        disk.check_database_files(file)
        with contextlib.closing(
            sqlite3.connect(file, timeout=_PATIENCE_SECS, isolation_level=None)
        ) as db:
            disk.limit_steps(db, file)
            disk.use_log(db)
            if not _has_messages(db):
                db.execute(_SCHEMA.replace("TABLE", "TABLE IF NOT EXISTS"))
            yield db


def _has_messages(db: sqlite3.Connection) -> bool:
    """Return whether a database has its table; raises ValueError if it has other ones."""
    if db.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone() is None:
        return False
    if not disk.has_schema(db, _SCHEMA):
        raise ValueError("it is a database of another program")
    return True


@contextlib.contextmanager
def _explained(file: Path) -> Iterator[None]:
    try:
        yield
    except (sqlite3.Error, OSError, ValueError, TypeError) as error:
        disk.raise_interrupt()
        raise StorageError(
            f"{file} cannot be used: {error}; free some space or repair the disk, or, if the file "
            "is damaged, move it away, and try again"
        ) from error
