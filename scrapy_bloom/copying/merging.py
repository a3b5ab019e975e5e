"""Create filters in files atomically, and merge filters into one that has the requests of all."""

import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from itertools import zip_longest
from pathlib import Path

from scrapy_bloom.exceptions import (
    FingerprinterMismatchError,
    GeometryMismatchError,
    LockedError,
    StorageError,
)
from scrapy_bloom.files import forgotten as forgotten_file
from scrapy_bloom.files.directory import (
    FilterReader,
    check_closed,
    check_free,
    draft_directory,
    open_files,
    other_files,
)
from scrapy_bloom.files.file import FileGeneration, FilterFile
from scrapy_bloom.files.forgotten import ForgottenFile
from scrapy_bloom.filters.bloom import BloomFilter
from scrapy_bloom.generations.policy import FilterStatus
from scrapy_bloom.job.disk import sync_directory
from scrapy_bloom.job.jobdir import DATABASE, LOCK_NAME, file_name, filter_files, lock_directory
from scrapy_bloom.job.recovery import Job


@contextmanager
def new_filter(target: Path) -> Iterator[Path]:
    """Create a filter from files that a `with` block makes in the directory that it gets.

    The block closes the files. It may make the database of a queue, too, which becomes that of the
    job with the target. If the block fails, its files are removed. If the process is killed, the
    unfinished files do not count as a filter, and the next call removes them.

    Args:
        target: the directory, without a filter yet; created if missing.

    Raises:
        StorageError: the directory has a filter, or is in use.
    """
    check_free(target)
    with ExitStack() as stack:
        stack.enter_context(no_new_directory(target))
        stack.callback(lock_directory(target).release)
        if filter_files(target):
            raise StorageError(f"{target} holds a filter already; give another directory")
        drafts = draft_directory(target)
        parts: dict[Path, Path] = {}
        try:
            _remove_drafts(target)
            drafts.mkdir()
            yield drafts
            # A filter without its queue would report the pending requests as duplicates. The newest
            # file names the oldest: a filter with missing files is refused.
            if (queue := drafts / DATABASE).exists():
                parts[queue] = target.parent / DATABASE
            for path in [*forgotten_file.files(drafts), *reversed(filter_files(drafts))]:
                parts[path] = target / path.name
            for draft, path in parts.items():
                draft.rename(path)
                sync_directory(path.parent)
            drafts.rmdir()
        except BaseException:
            for path in reversed(parts.values()):
                path.unlink(missing_ok=True)
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
    except LockedError:  # another process has made them
        raise
    except BaseException:
        with suppress(OSError):
            for directory in missing:
                if [each.name for each in directory.iterdir()] == [LOCK_NAME]:
                    (directory / LOCK_NAME).unlink()
                directory.rmdir()
        raise


def add_forgotten(target: Path, fingerprints: Iterable[bytes]) -> None:
    """Add forgotten fingerprints of a source to the forgotten set of its copy."""
    if forgotten := list(fingerprints):
        with closing(ForgottenFile(target / forgotten_file.NAME)) as file:
            file.add(forgotten)


def merge(sources: Sequence[Path], target: Path) -> FilterStatus:
    """Create a filter with the requests of all sources, without changing the sources.

    Args:
        sources: filter directories, job directories with a filter, or files. Their sizes, hashes
            and salts must be equal.
        target: the directory of the new filter, without a filter yet; created if missing.

    Returns:
        The figures of the new filter. Its count is estimated from its bits, within 1 %.

    Raises:
        GeometryMismatchError: sizes, hashes or salts differ, or a filter has a window.
        StorageError: or one of its children: a source is unusable, in use or was not closed; the
            target holds a filter, or has no room. An unfinished filter is removed.
    """
    with ExitStack() as stack:
        readers = [stack.enter_context(closing(FilterReader(each))) for each in sources]
        for source, reader in zip(sources, readers, strict=True):
            check_closed(source, reader.files)
        parts = _parts([reader.files for reader in readers])
        drafts = stack.enter_context(new_filter(target))
        made = [_merged(drafts, number, part) for number, part in enumerate(parts, 1)]
        for reader in readers:
            add_forgotten(drafts, reader.forgotten.all())
        return FilterStatus.of(str(target), made, made[-1].origin.error_rate)


def merge_into(source: Path, target: Path) -> FilterStatus:
    """Add the requests of a filter to another filter; may be repeated after an interruption.

    Args:
        source: a filter directory, a job directory with a filter, or a file.
        target: the directory of a filter with equal sizes, hashes and salt.

    Returns:
        The figures of the target.

    Raises:
        GeometryMismatchError: sizes, hashes or salts differ, or a filter has a window.
        StorageError: or one of its children: a filter is unusable, in use or was not closed.
    """
    with ExitStack() as stack:
        reader = stack.enter_context(closing(FilterReader(source)))
        check_closed(source, reader.files)
        check_free(target)
        stack.callback(lock_directory(target).release)
        present = open_files(target, reader.fingerprinter, Job()).files
        for file in present:
            stack.callback(file.close)
        _parts([present, reader.files])  # checks the files
        for ours, theirs in zip_longest(present, reader.files):
            if ours is None:
                present.append(_merged(target, len(present) + 1, [theirs]))
            elif theirs is not None:
                bits: BloomFilter = ours.filter
                bits |= theirs.filter
                ours.count = _count(bits, [ours, theirs])
                ours.save()
                ours.sync()
        add_forgotten(target, reader.forgotten.all())
        return FilterStatus.of(str(target), present, present[-1].origin.error_rate)


def _parts(filters: Sequence[Sequence[FilterFile]]) -> list[list[FilterFile]]:
    """Return, for each generation of the result, its source files.

    Raises FingerprinterMismatchError or GeometryMismatchError if the files cannot be merged.
    """
    newest = [files[-1].origin for files in filters]
    for origin in newest[1:]:
        if origin.fingerprinter != newest[0].fingerprinter:
            raise FingerprinterMismatchError(
                f"the filters were recorded with different REQUEST_FINGERPRINTER_CLASS: "
                f"{newest[0].fingerprinter!r} and {origin.fingerprinter!r}; only the same requests "
                "with the same fingerprints can be merged"
            )
    for files in filters:
        if any(file.open_until for file in files):
            raise GeometryMismatchError(
                f"{files[0].path.parent} has a time window (BLOOM_WINDOW_SECS): its generations "
                "end at different times, so they cannot be merged"
            )
    parts = [[file for file in each if file is not None] for each in zip_longest(*filters)]
    for first, *others in parts:
        for other in others:
            if differences := first.filter.differences(other.filter):
                raise GeometryMismatchError(
                    f"{first.path} and {other.path} cannot be merged: {', '.join(differences)}. "
                    "Create both with the same BLOOM_EXPECTED_REQUESTS, BLOOM_ERROR_RATE and "
                    "BLOOM_SALT (see `scrapy bloom info`), for example from their sources with "
                    "`scrapy bloom import`"
                )
    return parts


def _merged(target: Path, number: int, part: Sequence[FilterFile]) -> FilterFile:
    """Create the file of a merged generation, and close it."""
    first = part[0]
    new = FileGeneration(
        path=target / file_name(number),
        number=number,
        geometry=first.geometry,
        capacity=first.capacity,
        error_rate=first.error_rate,
        created_at=min(file.created_at for file in part),
        origin=first.origin,
    )

    def fill(bits: BloomFilter) -> int:
        for file in part:
            bits |= file.filter
        return _count(bits, part)

    with closing(FilterFile.create(new, fill)) as file:
        return file


def _count(bits: BloomFilter, files: Sequence[FilterFile]) -> int:
    """Estimate the count of a merged filter, which is at least that of each source."""
    counts = [file.count for file in files]
    if len(counts) == 1:
        return counts[0]
    return max(*counts, bits.approximate_count)
