"""What Scrapy keeps in a job directory, as far as it concerns a filter.

Scrapy writes the state of its disk queue (`requests.queue/active.json`) at a clean close only.
After a kill, the requests of that time are lost, and a stale state makes the resumed crawl hang.
"""

import time
from pathlib import Path

SET_ASIDE = ".set-aside-"


def queue_path(job_dir: Path) -> Path:
    """Scrapy's disk queue, a directory."""
    return job_dir / "requests.queue"


def seen_path(job_dir: Path) -> Path:
    """The fingerprints recorded by Scrapy's own filter."""
    return job_dir / "requests.seen"


def set_aside(path: Path) -> Path:
    """Rename a file or directory out of the way, within its directory.

    Args:
        path: what exists and shall be out of the way, but kept.

    Returns:
        Its new path, `NAME.set-aside-YYYYMMDD-HHMMSS`, which did not exist before.
    """
    stamp = time.strftime("%Y%m%d-%H%M%S")
    target = path.with_name(f"{path.name}{SET_ASIDE}{stamp}")
    number = 2
    while target.exists():
        target = path.with_name(f"{path.name}{SET_ASIDE}{stamp}-{number}")
        number += 1
    return path.rename(target)


def was_set_aside(path: Path) -> bool:
    """Whether a former file or directory of that name lies set aside beside it."""
    return any(path.parent.glob(f"{path.name}{SET_ASIDE}*"))
