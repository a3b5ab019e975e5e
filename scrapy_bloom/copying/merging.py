"""Merge filters in files: the result holds whatever any of them holds."""

from collections.abc import Sequence
from contextlib import ExitStack, closing
from itertools import zip_longest
from pathlib import Path

from scrapy_bloom.copying.new_filter import add_forgotten, new_filter
from scrapy_bloom.exceptions import FingerprinterMismatchError, GeometryMismatchError
from scrapy_bloom.files.directory import (
    FilterReader,
    check_closed,
    check_free,
    draft_directory,
    open_files,
)
from scrapy_bloom.files.file import FileGeneration, FilterFile
from scrapy_bloom.filters.bloom import BloomFilter
from scrapy_bloom.generations.backend import FilterStatus
from scrapy_bloom.job.locks import lock_directory
from scrapy_bloom.job.paths import file_name
from scrapy_bloom.job.recovery import Job


def merge(sources: Sequence[Path], target: Path) -> FilterStatus:
    """Make a filter that holds what any of some filters holds, and leave those as they are.

    Args:
        sources: each a filter directory, a job directory with one, or a file; all made alike.
        target: the directory of the new filter, without one yet; made if missing.

    Returns:
        What the new filter is. What it has recorded is counted from its bits, within 1 %.

    Raises:
        GeometryMismatchError: sizes, hashes or salts differ, or a filter has a window.
        StorageError: or one of its children: a source is unusable, in use or was not closed; the
            target holds a filter, or has no room. What was begun is removed.
    """
    with ExitStack() as stack:
        readers = [stack.enter_context(closing(FilterReader(each))) for each in sources]
        for source, reader in zip(sources, readers, strict=True):
            check_closed(source, reader.files)
        parts = _parts([reader.files for reader in readers])
        made = stack.enter_context(new_filter(target, otherwise="another directory"))
        for number, part in enumerate(parts, 1):
            made.append(_merged(draft_directory(target), number, part))
        for reader in readers:
            add_forgotten(draft_directory(target), reader.forgotten.all())
        return FilterStatus.of(str(target), made, made[-1].origin.error_rate)


def merge_into(source: Path, target: Path) -> FilterStatus:
    """Add to a filter what another one holds. Interrupted, it can be repeated.

    Args:
        source: a filter directory, a job directory with one, or a file.
        target: the directory of a filter, made alike; `merge` says what is refused.

    Returns:
        What the target is now.
    """
    with ExitStack() as stack:
        reader = stack.enter_context(closing(FilterReader(source)))
        check_closed(source, reader.files)
        check_free(target)
        stack.callback(lock_directory(target).release)
        present = open_files(target, reader.fingerprinter, Job(None, "stop")).files
        for file in present:
            stack.callback(file.close)
        _parts([present, reader.files])  # checks them
        for here, there in zip_longest(present, reader.files):
            if here is None:
                new = _merged(target, len(present) + 1, [there])
                stack.callback(new.close)
                present.append(new)
            elif there is not None:
                bits: BloomFilter = here.filter
                bits |= there.filter
                here.count = _count(bits, [here, there])
                here.save()
                here.sync()
        add_forgotten(target, reader.forgotten.all())
        return FilterStatus.of(str(target), present, present[-1].origin.error_rate)


def _parts(filters: Sequence[Sequence[FilterFile]]) -> list[list[FilterFile]]:
    """Return, for each generation of the result, the files of which it is made, all alike."""
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
                "end at times of their own, and cannot be merged"
            )
    parts = [[file for file in each if file is not None] for each in zip_longest(*filters)]
    for first, *others in parts:
        for other in others:
            if differences := first.filter.differences(other.filter):
                raise GeometryMismatchError(
                    f"{first.path} and {other.path} cannot be merged: {', '.join(differences)}. "
                    "Make both with the same BLOOM_EXPECTED_REQUESTS, BLOOM_ERROR_RATE, "
                    "BLOOM_ON_FULL and BLOOM_SALT (as scrapy bloom info shows "
                    "them), for example from their sources by scrapy bloom import"
                )
    return parts


def _merged(target: Path, number: int, part: Sequence[FilterFile]) -> FilterFile:
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

    return FilterFile.create(new, fill)


def _count(bits: BloomFilter, files: Sequence[FilterFile]) -> int:
    """Return how many requests a merged filter holds: at least as many as each of its sources."""
    counts = [file.count for file in files]
    if len(counts) == 1:
        return counts[0]
    return max(*counts, bits.approximate_count)
