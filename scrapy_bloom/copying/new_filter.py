"""A new filter in a directory: all of it appears, or nothing."""

import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.files import forgotten as forgotten_file
from scrapy_bloom.files.directory import check_free, draft_directory, other_files
from scrapy_bloom.files.file import FilterFile
from scrapy_bloom.files.forgotten import ForgottenFile
from scrapy_bloom.job.disk import sync_directory
from scrapy_bloom.job.locks import LOCK_NAME, lock_directory
from scrapy_bloom.job.paths import filter_files

_LOCKS = {LOCK_NAME}


@contextmanager
def new_filter(
    target: Path,
    *,
    otherwise: str,
    before: Callable[[], None] = lambda: None,
    is_locked: bool = False,
) -> Iterator[list[FilterFile]]:
    """Have a block make the files of a filter, and remove what it made if it fails.

    The block makes them in the `draft_directory` of the target, and puts them into a list, oldest
    first. If we are killed before all are there, they are no filter, and the next time they are
    removed.

    Args:
        target: the directory, without a filter yet; made if missing.
        otherwise: which directory to give if it has one.
        before: called when the files are complete, before they are put in their place.
        is_locked: the caller has the lock of the directory.

    Raises:
        StorageError: there is a filter, or the directory is in use.
    """
    check_free(target, is_locked=is_locked)
    with ExitStack() as stack:
        stack.enter_context(no_new_directory(target))
        if not is_locked:
            stack.callback(lock_directory(target).release)
        if filter_files(target):
            raise StorageError(f"{target} holds a filter already; give {otherwise}")
        drafts = draft_directory(target)
        made: list[FilterFile] = []
        try:
            _remove_drafts(target)
            drafts.mkdir()
            try:
                yield made
            finally:
                for file in made:
                    file.close()
            before()
            # The newest one tells which others there are: a filter that lacks them is refused.
            for path in [*forgotten_file.files(drafts), *(file.path for file in reversed(made))]:
                path.rename(target / path.name)
            sync_directory(target)
            drafts.rmdir()
        except BaseException:
            for file in made:
                (target / file.path.name).unlink(missing_ok=True)
            _remove_drafts(target)
            raise


def _remove_drafts(target: Path) -> None:
    """Remove what is left of a copy that did not come to its end; there is no filter."""
    for path in other_files(target):
        path.unlink()
    with suppress(FileNotFoundError):
        shutil.rmtree(draft_directory(target))


@contextmanager
def no_new_directory(path: Path) -> Iterator[None]:
    """Remove the directories that a block has made if it fails, where they hold locks at most."""
    missing = [each for each in (path, *path.parents) if not each.exists()]
    try:
        yield
    except BaseException:
        with suppress(OSError):
            for directory in missing:
                found = list(directory.iterdir())
                if not {each.name for each in found} <= _LOCKS:
                    break
                for lock in found:
                    lock.unlink()
                directory.rmdir()
        raise


def add_forgotten(target: Path, fingerprints: Iterable[bytes]) -> None:
    """Let a copy forget what its source has: rather crawled twice than never."""
    if forgotten := list(fingerprints):
        with closing(ForgottenFile(target / forgotten_file.NAME)) as file:
            file.add(forgotten)
