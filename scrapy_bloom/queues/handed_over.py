"""Hand requests and changes of the queue over to the crawl of a job directory, in files.

Only the crawl may change its database and its filter. So a command writes each file atomically into
a directory of the job. The crawl looks for files twice a second, and deletes a file once it has
applied it. A job that is not running does so when it is resumed. If the crawl is killed before it
has deleted a file, the next run reads the file again. Its filter drops the requests that were
queued already, except requests with `dont_filter`, which are queued twice.
"""

import re
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.job.disk import check_file, replace_file, sync_directory
from scrapy_bloom.queues.database import MOVABLE
from scrapy_bloom.queues.serialized import plain, serialized
from scrapy_bloom.queues.store import State

MOST_IN_A_FILE = 1000  # requests: the crawl queues a file in one turn of its event loop

_DIRECTORY = "requests.added"
# The time of writing in nanoseconds, random digits, and the number of requests in the file.
_NAME = re.compile(r"\d{20}-[0-9a-f]{8}-(\d{1,4})")


class Move(NamedTuple):
    """A change of the queue, with the arguments of `Queue.move`."""

    state: State
    to: State | None
    slot: str | None = None


def hand_over(job_dir: Path, requests: Sequence[Mapping[str, Any]]) -> None:
    """Write requests, in the form of `Request.to_dict`, for the crawl of a job; raises OSError."""
    _write(job_dir, {"requests": list(requests)}, len(requests))


def hand_over_move(job_dir: Path, move: Move) -> None:
    """Write a change of the queue for the crawl of a job; raises OSError."""
    to = None if move.to is None else move.to.value
    _write(job_dir, {"move": [move.state.value, to, move.slot]}, 0)


def _write(job_dir: Path, contents: Mapping[str, Any], number: int) -> None:
    directory = job_dir / _DIRECTORY
    directory.mkdir(exist_ok=True)
    sync_directory(job_dir)
    name = f"{time.time_ns():020}-{secrets.token_hex(4)}-{number}"
    replace_file(directory / name, serialized(contents))


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


def read_handed_over(path: Path) -> list[dict[str, Any]] | Move | None:
    """Return the requests or the change in a file, or None if it is damaged.

    Code that the file may contain is not run. Raises OSError if the file cannot be read.
    """
    try:
        check_file(path)
    except StorageError:
        return None
    contents = plain(path.read_bytes()) or {}
    requests, move = contents.get("requests"), contents.get("move")
    if isinstance(requests, list) and all(isinstance(each, dict) for each in requests):
        return requests
    try:
        state, to, slot = move  # type: ignore[misc] # of any type, because the file is untrusted
        found = Move(State(state), None if to is None else State(to), slot)
    except (TypeError, ValueError):
        return None
    can_move = found.state in MOVABLE and found.to in {None, State.PENDING} - {found.state}
    return found if can_move and isinstance(slot, str | None) else None
