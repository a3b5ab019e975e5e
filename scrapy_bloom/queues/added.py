"""Requests that `scrapy bloom add` hands over to a job: files that its crawl takes up.

The crawl alone may change its database and its filter. So the command writes files beside them,
whole or not at all, and the crawl removes each once its requests are queued. If it is killed before
that, it reads the file again: its filter then drops what was queued, except requests with
`dont_filter`, which are queued twice.
"""

import re
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.job.disk import replace_file, sync_directory
from scrapy_bloom.job.paths import check_file
from scrapy_bloom.queues.batch import plain, serialized

MOST_IN_A_FILE = 1000  # requests, which the event loop of the crawl queues in one turn

_DIRECTORY = "requests.added"
# When it was written, in nanoseconds; something random; and how many requests it has.
_NAME = re.compile(r"\d{20}-[0-9a-f]{8}-(\d{1,4})")


def hand_over(job_dir: Path, requests: Sequence[Mapping[str, Any]]) -> None:
    """Write requests, as `Request.to_dict` makes them, for the crawl of a job; raises OSError."""
    directory = job_dir / _DIRECTORY
    directory.mkdir(exist_ok=True)
    sync_directory(job_dir)
    name = f"{time.time_ns():020}-{secrets.token_hex(4)}-{len(requests)}"
    replace_file(directory / name, serialized({"requests": list(requests)}))


def added_files(job_dir: Path) -> list[Path]:
    """Return the files that the crawl of a job has not taken up, the oldest first."""
    try:
        found = [each for each in (job_dir / _DIRECTORY).iterdir() if _NAME.fullmatch(each.name)]
    except OSError:  # mostly, there is no such directory
        return []
    return sorted(found)


def count_added(job_dir: Path) -> int:
    """Return how many requests the crawl of a job has not taken up."""
    return sum(int(each.name.rpartition("-")[2]) for each in added_files(job_dir))


def read_added(path: Path) -> list[dict[str, Any]] | None:
    """Return the requests in a file; None if it is damaged. No code that is in it is run.

    Raises OSError if the file cannot be read, which may pass.
    """
    try:
        check_file(path)
    except StorageError:
        return None
    found = (plain(path.read_bytes()) or {}).get("requests")
    if isinstance(found, list) and all(isinstance(each, dict) for each in found):
        return found
    return None
