"""Create a filter in a directory atomically."""

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
    """Create a filter from files that a `with` block makes.

    The block makes the files in the `draft_directory` of the target, and appends them to the list
    that it gets, oldest first. If the block fails, its files are removed. If the process is killed,
    the unfinished files do not count as a filter, and the next call removes them.

    Args:
        target: the directory, without a filter yet; created if missing.
        otherwise: the advice which directory to give, for the error if it has a filter.
        before: called when the files are complete, before they are moved to the target.
        is_locked: whether the caller has the lock of the directory.

    Raises:
        StorageError: the directory has a filter, or is in use.
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
            # The newest file names the oldest: a filter with missing files is refused.
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
    """Remove the files of an unfinished copy from a directory without a filter."""
    for path in other_files(target):
        path.unlink()
    with suppress(FileNotFoundError):
        shutil.rmtree(draft_directory(target))


@contextmanager
def no_new_directory(path: Path) -> Iterator[None]:
    """If a `with` block fails, remove the directories that it has made, unless they have files."""
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
    """Add forgotten fingerprints of a source to the forgotten set of its copy."""
    if forgotten := list(fingerprints):
        with closing(ForgottenFile(target / forgotten_file.NAME)) as file:
            file.add(forgotten)
