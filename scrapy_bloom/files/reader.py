"""Read the files of a filter, also of a running crawl, without any change to them."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from types import MappingProxyType

from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.files import forgotten as forgotten_file
from scrapy_bloom.files.directory import live_among
from scrapy_bloom.files.forgotten import ForgottenFile
from scrapy_bloom.files.header import FileGeneration
from scrapy_bloom.files.log_records import LogRecords
from scrapy_bloom.files.mapping import FilterFile
from scrapy_bloom.generations.lookup import Lookup
from scrapy_bloom.generations.policy import unexpired
from scrapy_bloom.job.locks import LOCK_NAME, is_held
from scrapy_bloom.job.paths import filter_files, is_job


def filter_directory(path: Path) -> Path:
    """Return where a filter's files are, or go: the `bloom` of a job directory, or the path."""
    inner = path / "bloom"
    if not filter_files(inner):
        has_inner = is_job(path) or draft_directory(inner).exists()
        return inner if has_inner and not filter_files(path) else path
    if filter_files(path):
        raise StorageError(
            f"there is a filter in {path} and another in {inner}: a crawl uses the first one if "
            f"{path} is its BLOOM_DIR, the second one if that is its JOBDIR. Say {inner}, or move "
            "the one away that is not used"
        )
    return inner


def draft_directory(directory: Path) -> Path:
    """Return where the files of a copy are before all of them are there."""
    return directory / "unfinished-copy"


def found_files(path: Path) -> list[FileGeneration]:
    """Read the headers of a filter's live generations, oldest first, at least one.

    Args:
        path: a filter directory (a BLOOM_DIR), a job directory with one, or one file.

    Raises:
        StorageError: there is no filter, or one of its files is unusable or missing.
    """
    if path.is_file():
        return [FileGeneration.at(path)]
    directory = filter_directory(path)
    # A crawl may just remove files that are over; those that count are found the next time.
    for is_last in (False, True):
        found = filter_files(directory)
        if not found:
            break
        try:
            return live_among(directory, [FileGeneration.at(each) for each in found])
        except StorageError:
            if is_last:
                raise
    if draft_directory(directory).exists():
        raise StorageError(
            f"{path} holds no filter, but the beginning of a copy that was interrupted: repeat the "
            "scrapy bloom pull, merge or import; or remove it with scrapy bloom reset"
        )
    raise StorageError(
        f"{path} holds no filter; give a JOBDIR, a BLOOM_DIR, or one generation-*.bloom file of it"
        + ("" if path.exists() else " (there is no such file or directory)")
    )


def forgotten_beside(path: Path) -> ForgottenFile:
    """Return the forgotten requests of a filter, read only; for the path, see `found_files`."""
    directory = path.parent if path.is_file() else filter_directory(path)
    return ForgottenFile(directory / forgotten_file.NAME, readonly=True)


class FilterReader:
    """A filter in files, mapped for reading only: nothing is locked, nothing changes.

    While a crawl runs, it sees what is recorded later, too, but not in later generations.
    `RedisReader` has the same methods.

    Args:
        path: see `found_files`, which may raise.
        window: BLOOM_WINDOW_SECS of its crawls; 0: as the files tell.
        recent: changes that the log of a crawl has and the filter lacks: of each fingerprint the
            latest `Change.forgets`.
    """

    def __init__(
        self,
        path: Path,
        *,
        window: float = 0.0,
        recent: Mapping[bytes, bool | None] = MappingProxyType({}),
    ) -> None:
        with ExitStack() as stack:
            self.files: Sequence[FilterFile] = [
                stack.enter_context(closing(FilterFile.open(each.path, readonly=True)))
                for each in found_files(path)
            ]
            stack.pop_all()  # they stay open
        self._recent = recent
        newest = self.files[-1]
        self.location = str(newest.path.parent)
        self.spider, self.fingerprinter = newest.origin.spider, newest.origin.fingerprinter
        self.error_rate = newest.origin.error_rate  # as asked for; 0: not said
        self.salt = newest.salt.hex()
        self.names = [file.path.name for file in self.files]
        self.generations = [file.figures for file in self.files]
        bits = [file.filter for file in unexpired(self.files, time.time(), window)]
        self._lookup = lookup = Lookup(bits) if bits else None
        self.generations[-1].count += sum(lookup is None or each not in lookup for each in recent)
        self.forgotten = forgotten_beside(path)

    def are_seen(self, fingerprints: Sequence[bytes]) -> list[bool]:
        """Return which fingerprints a crawl would filter: recorded, and not forgotten."""
        recorded = self.are_recorded(fingerprints)
        if not (self.count_forgotten() or any(self._recent.values())):
            return recorded
        asked = zip(fingerprints, recorded, strict=True)
        return [is_recorded and not self._is_forgotten(each) for each, is_recorded in asked]

    def _is_forgotten(self, fingerprint: bytes) -> bool:
        is_forgotten = self._recent.get(fingerprint)
        return self.forgotten.has(fingerprint) if is_forgotten is None else is_forgotten

    def are_recorded(self, fingerprints: Sequence[bytes]) -> list[bool]:
        """Return which fingerprints are recorded, or seem to be, at the error rate."""
        lookup, recent = self._lookup, self._recent
        return [each in recent or (lookup is not None and each in lookup) for each in fingerprints]

    def block_fills(self) -> list[Iterator[float]]:
        """Return for each generation the share of set bits of each of its blocks, 0 to 1."""
        return [file.filter.block_fills() for file in self.files]

    def count_forgotten(self) -> int:
        """Count the requests that are to be crawled again."""
        changed = ((each, now) for each, now in self._recent.items() if now is not None)
        return len(self.forgotten) + sum(now - self.forgotten.has(each) for each, now in changed)

    def is_closed(self) -> bool | None:
        """Check that the last crawl with the filter has closed it."""
        directory = self.files[-1].path.parent
        return not (any(file.in_use for file in self.files) or LogRecords.read(directory).open)

    def is_in_use(self) -> bool | None:
        """Check whether a crawl has the filter now; None where that cannot be told."""
        return is_held(self.files[-1].path.with_name(LOCK_NAME))

    def close(self) -> None:
        """Unmap the files."""
        self.forgotten.close()
        for file in self.files:
            file.close()
