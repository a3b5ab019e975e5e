"""Files by which `scrapy bloom add` hands requests to the crawl of a job.

Only the crawl may change its database and its filter. So the command writes each file atomically
into a directory of the job, and the crawl deletes the file once its requests are queued. If the
crawl is killed before that, the next run reads the file again. Its filter drops the requests that
were queued already, except requests with `dont_filter`, which are queued twice.
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

MOST_IN_A_FILE = 1000  # requests: the crawl queues a file in one turn of its event loop

_DIRECTORY = "requests.added"
# The time of writing in nanoseconds, random digits, and the number of requests in the file.
_NAME = re.compile(r"\d{20}-[0-9a-f]{8}-(\d{1,4})")


def hand_over(job_dir: Path, requests: Sequence[Mapping[str, Any]]) -> None:
    """Write requests, in the form of `Request.to_dict`, for the crawl of a job.

    Raises OSError.
    """
    directory = job_dir / _DIRECTORY
    directory.mkdir(exist_ok=True)
    sync_directory(job_dir)
    name = f"{time.time_ns():020}-{secrets.token_hex(4)}-{len(requests)}"
    replace_file(directory / name, serialized({"requests": list(requests)}))


def added_files(job_dir: Path) -> list[Path]:
    """Return the files that the crawl of a job has not queued yet, the oldest first."""
    try:
        found = [each for each in (job_dir / _DIRECTORY).iterdir() if _NAME.fullmatch(each.name)]
    except OSError:  # usually, there is no such directory
        return []
    return sorted(found)


def count_added(job_dir: Path) -> int:
    """Return how many handed-over requests the crawl of a job has not queued yet."""
    return sum(int(each.name.rpartition("-")[2]) for each in added_files(job_dir))


def read_added(path: Path) -> list[dict[str, Any]] | None:
    """Return the requests in a file, or None if it is damaged.

    Code that the file may contain is not run. Raises OSError if the file cannot be read.
    """
    try:
        check_file(path)
    except StorageError:
        return None
    found = (plain(path.read_bytes()) or {}).get("requests")
    if isinstance(found, list) and all(isinstance(each, dict) for each in found):
        return found
    return None
