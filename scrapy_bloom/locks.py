"""The lock file by which one crawl at a time has a directory or a database."""

import errno
import os
from pathlib import Path
from typing import Protocol

from scrapy_bloom.exceptions import LockedError, StorageError


class Lock(Protocol):
    """A lock that was taken."""

    def release(self) -> None:
        """Let others have it."""


def lock_file(path: Path, of: Path, settings: str) -> Lock:
    """Take a lock, at once or not at all.

    Args:
        path: the lock file; its directory is made.
        of: what it is the lock of, for the messages.
        settings: by which the user can choose another place.

    Returns:
        The lock, to be released.

    Raises:
        LockedError: another crawl has it.
        StorageError: its directory cannot be written to.
    """
    from filelock import FileLock, Timeout  # noqa: PLC0415 - half a MB, for crawls with a file only

    directory = path.parent
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if not os.access(directory, os.W_OK):
            # Its files might still be writable, but then setting one aside would fail later.
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        # The lock belongs to the filter, not to a thread: a crawl may be closed by another.
        lock = FileLock(path, timeout=0, thread_local=False)
        lock.acquire()
    except Timeout:
        raise LockedError(
            f"{of} is in use by another running crawl; wait for it to end, or give this one "
            f"another {settings}"
        ) from None
    except OSError as error:
        raise StorageError(
            f"{directory} cannot be written to: {error.strerror or error}; give the crawl the "
            f"right to write there, or another {settings}"
        ) from error
    return lock
