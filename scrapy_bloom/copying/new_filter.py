"""A new filter in a directory: all of it appears, or nothing."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.files import forgotten as forgotten_file
from scrapy_bloom.files.directory import check_free
from scrapy_bloom.files.forgotten import ForgottenFile
from scrapy_bloom.files.mapping import FilterFile
from scrapy_bloom.job.locks import lock_directory
from scrapy_bloom.job.paths import filter_files


@contextmanager
def new_filter(
    target: Path, *, otherwise: str, is_locked: bool = False
) -> Iterator[list[FilterFile]]:
    """Have a block make the files of a filter, and remove what it made if it fails.

    The block puts them into a list, oldest first. They say that they are in use until all are
    there: if we are killed before that, they are no filter.

    Args:
        target: the directory, without a filter yet; made if missing.
        otherwise: which directory to give if it has one.
        is_locked: the caller has the lock of the directory.

    Raises:
        StorageError: there is a filter; for more see `check_free`.
    """
    check_free(target, is_locked=is_locked)
    with ExitStack() as stack:
        if not is_locked:
            stack.callback(lock_directory(target).release)
        if filter_files(target):
            raise StorageError(f"{target} holds a filter already; give {otherwise}")
        made: list[FilterFile] = []
        try:
            try:
                yield made
                for file in made:
                    file.in_use = False
                    file.save()
                    file.sync()
            finally:
                for file in made:
                    file.close()
        except BaseException:
            for path in [*(file.path for file in made), *forgotten_file.files(target)]:
                path.unlink()
            raise


def add_forgotten(target: Path, fingerprints: Iterable[bytes]) -> None:
    """Let a copy forget what its source has: rather crawled twice than never."""
    if forgotten := list(fingerprints):
        with closing(ForgottenFile(target / forgotten_file.NAME)) as file:
            file.add(forgotten)
