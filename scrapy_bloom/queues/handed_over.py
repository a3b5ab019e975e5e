"""Hand requests and changes of the queue over to the crawl of a job directory, in files.

Only the crawl may change its database and its filter. So a command writes each file atomically into
a directory of the job. The crawl looks for files twice a second, and deletes a file once it has
applied it. A job that is not running does so when it is resumed. If the crawl is killed before it
has deleted a file, the next run reads the file again. Its filter drops the requests that were
queued already, except requests with `dont_filter`, which are queued twice.
"""

import json
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from scrapy_bloom.job.disk import explained, opened, replace_file, sync_directory
from scrapy_bloom.queues.rows import MOVABLE
from scrapy_bloom.queues.store import State

_MOST_REQUESTS = 1000  # of a file: the crawl queues a file in one turn of its event loop
_MOST_BYTES = 1 << 26  # of a file
_VALUES = {  # of a request
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

_DIRECTORY = "requests.added"
# The time of writing in nanoseconds, random digits, and the number of requests in the file.
_NAME = re.compile(r"\d{20}-[0-9a-f]{8}-(\d{1,4})")


class Move(NamedTuple):
    """A change of the queue, with the arguments of `Queue.move`."""

    state: State
    to: State | None
    slot: str | None = None


def hand_over(job_dir: Path, requests: Sequence[Mapping[str, Any]]) -> None:
    """Write requests, in the form of `Request.to_dict`, for the crawl of a job.

    Of their values, the crawl gets `_VALUES`. Raises StorageError.
    """
    contents = {"requests": [{name: _text(each[name]) for name in _VALUES} for each in requests]}
    half = len(requests) // 2
    if half and (len(requests) > _MOST_REQUESTS or len(json.dumps(contents)) > _MOST_BYTES):
        hand_over(job_dir, requests[:half])
        hand_over(job_dir, requests[half:])
    elif requests:
        _write(job_dir, contents, len(requests))


def _text(value: Any) -> Any:
    """Return a value of a request with texts in place of bytes, as its list had it."""
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, dict):
        return {_text(name): _text(each) for name, each in value.items()}
    return [_text(each) for each in value] if isinstance(value, list) else value


def hand_over_move(job_dir: Path, move: Move) -> None:
    """Write a change of the queue for the crawl of a job; raises StorageError."""
    to = None if move.to is None else move.to.value
    _write(job_dir, {"move": [move.state.value, to, move.slot]}, 0)


def _write(job_dir: Path, contents: Mapping[str, Any], number: int) -> None:
    directory = job_dir / _DIRECTORY
    name = f"{time.time_ns():020}-{secrets.token_hex(4)}-{number}"
    with explained(directory):
        directory.mkdir(exist_ok=True)
        sync_directory(job_dir)
        replace_file(directory / name, json.dumps(contents))


def handed_over_files(job_dir: Path) -> list[Path]:
    """Return the files that the crawl of a job has not applied yet, the oldest first."""
    try:
        names = [path for path in (job_dir / _DIRECTORY).iterdir() if _NAME.fullmatch(path.name)]
    except OSError:  # usually, there is no such directory
        return []
    return sorted(names)


def count_handed_over(job_dir: Path) -> int:
    """Return how many handed-over requests the crawl of a job has not queued yet."""
    return sum(int(path.name.rpartition("-")[2]) for path in handed_over_files(job_dir))


def read_handed_over(path: Path) -> list[dict[str, Any]] | Move:
    """Return the requests or the change in a file, which is untrusted.

    The requests have the form of `Request.to_dict`, without most values. May raise any exception.
    """
    with opened(path) as file:
        data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise ValueError("it is too long")
    match json.loads(data):
        case {"requests": [*requests]} if len(requests) <= _MOST_REQUESTS:
            return [_checked(each) for each in requests]
        case {"move": [str(state), str() | None as to, str() | None as slot]}:
            move = Move(State(state), None if to is None else State(to), slot)
            if move.state in MOVABLE and move.to in {None, State.PENDING} - {move.state}:
                return move
    raise ValueError("it has neither requests nor a change of the queue")


def _checked(values: Any) -> dict[str, Any]:
    if isinstance(values, dict) and all(
        name in values and isinstance(values[name], kind) for name, kind in _VALUES.items()
    ):
        return {name: values[name] for name in _VALUES}
    raise ValueError("a request has other values than those of a command")
