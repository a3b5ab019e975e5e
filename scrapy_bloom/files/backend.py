"""The filter of one machine: files in the job directory, or memory alone."""

import logging
import math
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.files import forgotten as forgotten_file
from scrapy_bloom.files.directory import FilterDirectory
from scrapy_bloom.files.forgotten import ForgottenFile
from scrapy_bloom.files.header import Header, State
from scrapy_bloom.files.journal import Journal
from scrapy_bloom.files.store import FileStore
from scrapy_bloom.filters.bloom import BloomFilter
from scrapy_bloom.filters.hashing import SALT_BYTES
from scrapy_bloom.generations.forgotten import Forgotten
from scrapy_bloom.generations.log import GenerationLog
from scrapy_bloom.generations.policy import LocalGeneration, Lookup, Policy, Size
from scrapy_bloom.generations.status import FilterStatus, GenerationStatus
from scrapy_bloom.job.recovery import Job
from scrapy_bloom.job.requests_seen import import_seen, open_seen

logger = logging.getLogger(__name__)


class LocalBackend:
    """A Bloom filter in a directory, or in memory if there is none.

    Args:
        directory: where the filter's files are, or None for memory only.
        capacity: requests that the crawl is expected to record.
        error_rate: the highest false-positive rate, over all generations.
        on_full: "grow" by a further generation, or stay as it is: "warn", "close".
        window_secs: how long a request is remembered, 0: for ever.
        salt: 16 bytes for a new filter; None: random.
        fingerprinter: import path of what makes the fingerprints.
        spider: the spider's name, kept with the filter for information.
        job: the crawl's job directory; its requests.seen is imported into a new filter. And what
            to do with a filter that its last run did not close.
        sync_secs: seconds between writes of what changed to the disk, against a power loss;
            0: at close only.
        is_crawl: False if no crawl uses it, and so being killed leaves nothing behind that is
            recorded but not crawled: the files are not noted as in use.
        claims: what was forgotten and is crawled again is forgotten still, until `ended`: the queue
            dies with this run.
        clock: seconds since 1970, for tests.

    Attributes:
        forgotten: the requests that are to be crawled again.
    """

    def __init__(
        self,
        directory: Path | None,
        *,
        capacity: int,
        error_rate: float,
        on_full: str = "grow",
        window_secs: float = 0.0,
        salt: bytes | None = None,
        fingerprinter: str = "",
        spider: str = "",
        job: Job | None = None,
        sync_secs: float = 30.0,
        is_crawl: bool = True,
        claims: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._policy = Policy(
            expected=capacity,
            error_rate=error_rate,
            on_full=on_full,
            window=window_secs,
        )
        self._salt = salt
        self._fingerprinter = fingerprinter
        self._spider = spider
        self._clock = clock
        self._store: FileStore | None = None
        if directory is not None:
            place = FilterDirectory(
                directory, fingerprinter=fingerprinter, job=job or Job(None, "keep")
            )
            self._store = FileStore(place, sync_secs, is_crawl=is_crawl)
        self._is_crawl = is_crawl
        path = directory / forgotten_file.NAME if directory is not None else None
        self.forgotten = Forgotten(
            ForgottenFile(path, claims=claims),
            is_shared=path is not None and is_crawl,
        )
        self._live: list[LocalGeneration] = self._store.live if self._store is not None else []
        self._kept: list[LocalGeneration] = []  # expired, but this run has recorded in them
        self._first: float = math.inf  # the number of the generation that it began to record in
        self._begun_at = 0.0
        self._last_status: FilterStatus | None = None
        self._lookup: Lookup | Journal
        self._record: Callable[[bytes], bool]
        self._keep: Callable[[bytes], object]
        self._newest: LocalGeneration
        self._begun = False
        self._next_save: float = math.inf  # at this count, write it down
        self._grow_at: float = math.inf  # at this count, a new request needs a new generation
        self._due: float = math.inf  # at this time, a generation ends or expires
        self._log = GenerationLog()

    def open(self) -> None:
        """Lock the directory and open or create the filter in it.

        Nothing is recorded as in use yet: until `begin`, a crash leaves a closed filter closed.

        Raises:
            StorageError: or one of its children: see `scrapy_bloom.exceptions`. Every file is
                then as it was before.
            SeenFileError: the job's requests.seen cannot be imported.
        """
        if self._store is None:
            size = self._policy.first()
            try:
                self._live.append(self._created(size))
            except MemoryError:
                raise StorageError(
                    f"there is no memory for a filter of {size.geometry.nbytes:,} bytes; lower "
                    "BLOOM_EXPECTED_REQUESTS, or set BLOOM_DIR or JOBDIR to keep it in a file"
                ) from None
        else:
            self._store.load()
            try:
                self.forgotten.open()
                if self._live:
                    self._log_what_is_kept()
                else:
                    self._live.append(self._first_created(self._store.importable()))
            except BaseException:
                self._store.unlock()
                raise
        self._changed()

    def begin(self) -> None:
        """Mark the filter as in use, and write that to the disk, before the first request.

        From here to `close`, whoever finds the filter knows that its crawl did not end well.
        """
        if self._begun:
            return
        self._begun = True
        self._save()
        if self._store is not None:
            self._store.begin()
        newest = self._newest
        if self._policy.window:
            self._warn_if_the_clock_went_back()
            # If the window was shortened, so is what is left of the quarter.
            newest.open_until = min(newest.open_until, self._policy.open_until(self._now()))
            self._turn()
            if self._is_crawl:
                self._first, self._begun_at = self._newest.number, self._now()
        elif newest.open_until:
            newest.open_until = 0.0  # there is no window any more
            self._save()

    def add(self, fingerprint: bytes) -> bool:
        """Record a fingerprint; True if it was new. See `BloomFilter.add`."""
        if not self._begun:
            self.begin()
        if self._policy.window and self._clock() >= self._due:
            self._turn()
        if self._newest.count >= self._grow_at:
            if fingerprint in self._lookup:
                return self._is_new_once_more(fingerprint)
            self._grow()
        if not self._record(fingerprint):
            return self._is_new_once_more(fingerprint)
        self.forgotten.take(fingerprint)  # new it is anyway, and once
        newest = self._newest
        newest.count += 1
        if newest.count >= self._next_save:
            self._save()
        return True

    def _is_new_once_more(self, fingerprint: bytes) -> bool:
        """Check whether a recorded fingerprint was forgotten; it is not, from now on."""
        if not self.forgotten.take(fingerprint):
            return False
        if self._policy.window and fingerprint not in self._newest.filter:
            self._keep(fingerprint)  # for a whole window from now on
            self._newest.count += 1
        return True

    def forget(self, fingerprints: Sequence[bytes]) -> None:
        """Let fingerprints be new once more; see `Backend.forget`."""
        self.forgotten.add(fingerprints)

    def ended(self, fingerprints: Sequence[bytes]) -> None:
        """Note that requests were crawled; see `Backend.ended`."""
        self.forgotten.remove(fingerprints)

    def __contains__(self, fingerprint: bytes) -> bool:
        if self._policy.window and self._begun and self._clock() >= self._due:
            self._turn()
        return fingerprint in self._lookup and fingerprint not in self.forgotten

    def close(self) -> None:
        """Write everything to the disk, note that it is closed, and release the directory.

        Raises:
            StorageError: the disk failed; the filter stays in use.
        """
        self._last_status = self.status()
        try:
            self.forgotten.close()
        finally:
            if self._store is not None:
                self._store.close()

    def status(self) -> FilterStatus:
        """Return the filter's figures now; after `close`, the last ones."""
        if self._last_status is not None:
            return self._last_status
        return FilterStatus(
            location=self._store.location if self._store else "memory",
            generations=[GenerationStatus.of(each) for each in self._live],
            error_rate=max(self._policy.error_rate, sum(each.error_rate for each in self._asked)),
            volatile=[GenerationStatus.of(each) for each in self._kept],
            errors=self._log.errors + (self._store.errors if self._store else 0),
            failure=self._log.failure or (self._store.failure if self._store else ""),
            expired=self._log.expired,
        )

    @property
    def _asked(self) -> list[LocalGeneration]:
        return [*self._kept, *self._live]

    def _now(self) -> float:
        # If the clock was set back, time stands still until it has caught up: a request may be
        # remembered for longer, but never for less than the window.
        newest = self._live[-1].created_at if self._live else 0.0
        return max(self._clock(), newest)

    def _turn(self) -> None:
        """End what has ended: rotate to a new quarter, and let old generations expire."""
        if self._store is not None:
            self._store.settle()
        now = self._now()
        newest = self._newest
        if now >= newest.open_until:
            if newest.count == 0:
                newest.open_until = self._policy.open_until(now)
                self._save()
            else:
                self._rotate(now)
        if number := self._policy.expired(self._live, now):
            self._expire(number)
        self._changed()

    def _rotate(self, now: float) -> None:
        ended = self._newest
        in_quarter = sum(g.count for g in self._live if g.open_until == ended.open_until)
        try:
            size = self._policy.first(in_quarter, self._asked)
            self._append(size, now, self._policy.open_until(now))
        except (StorageError, MemoryError) as error:
            ended.open_until = now + (self._policy.open_until(now) - now) / 4
            self._save()
            self._log.log_cannot_turn(error)
            return
        self._log.log_turn(ended, self._newest)

    def _grow(self) -> None:
        if self._store is not None:
            self._store.settle()
        full = self._newest
        size = self._policy.next(self._live)
        try:
            self._append(size, self._now(), full.open_until)
        except (StorageError, MemoryError) as error:
            self._grow_at = full.count + max(1, full.capacity // 20)
            self._log.log_cannot_grow(error)
            return
        self._changed()
        self._log.log_growth(self._live)

    def _append(self, size: Size, now: float, open_until: float) -> None:
        """Add a generation; the one before it is complete."""
        full = self._newest
        new = self._created(size, full.number + 1, now, open_until)
        self._live.append(new)
        self._newest = new
        if self._store is not None:
            self._store.save_count(full)

    def _expire(self, number: int) -> None:
        gone = self._live[:number]
        del self._live[:number]
        self._kept += [
            each for each in gone if self._policy.is_kept(each, self._first, self._begun_at)
        ]
        if self._store is not None:
            self._store.expire(gone, still_asked=self._kept)
        numbers = [each.number for each in gone]
        self._log.log_expiry(numbers, sum(each.count for each in gone), self._policy.window)
        # Recorded before they were forgotten, they have all expired by then.
        self.forgotten.expire(2 * self._policy.window)

    def _changed(self) -> None:
        """The generations are others than before: look up in these from now on."""
        self._newest = self._live[-1]
        self._lookup = lookup = Lookup([each.filter for each in self._asked])
        self._keep = self._newest.filter.add
        self._record = lookup.add if len(self._asked) > 1 else self._newest.filter.add
        if self._store is not None and (journal := self._store.journal) is not None:
            journal.stand_before(lookup, self._newest.filter.add)
            self._lookup, self._record, self._keep = journal, journal.add, journal.keep
        self._grow_at = self._policy.grow_at(self._live)
        if self._policy.window:
            self._due = min(self._newest.open_until, self._policy.next_expiry(self._live))
        if self._begun:
            self._save()

    def _first_created(self, importable: Path | None) -> LocalGeneration:
        if importable is None:
            return self._created(self._policy.first())
        seen = open_seen(importable)
        size = self._policy.first(at_least=seen.count())
        return self._created(size, fill=lambda new: import_seen(seen, new.add))

    def _created(
        self,
        size: Size,
        number: int = 1,
        now: float | None = None,
        open_until: float | None = None,
        fill: Callable[[BloomFilter], int] | None = None,
    ) -> LocalGeneration:
        now = self._now() if now is None else now
        open_until = self._policy.open_until(now) if open_until is None else open_until
        salt = self._live[0].filter.salt if self._live else self._salt
        if self._store is None:
            bits = size.filter(salt)
            return LocalGeneration.of(size, number, now, open_until=open_until, filter=bits)
        header = Header(
            geometry=size.geometry,
            capacity=size.capacity,
            error_rate=size.error_rate,
            salt=salt or secrets.token_bytes(SALT_BYTES),
            fingerprinter=self._fingerprinter,
            spider=self._spider,
            created_at=now,
            generation=number,
        )
        oldest = self._live[0].number if self._live else number
        state = State(in_use=self._begun and self._is_crawl, open_until=open_until, oldest=oldest)
        return self._store.create(header, state, fill)

    def _log_what_is_kept(self) -> None:
        policy, first = self._policy, self._live[0].filter
        if self._salt not in {None, first.salt}:
            logger.info("The filter keeps the salt it was made with; BLOOM_SALT is for a new one")
        capacity = sum(each.capacity for each in self._live)
        if not policy.window and policy.expected > capacity:
            logger.info(
                "The filter was made for %s requests and keeps its files; BLOOM_EXPECTED_REQUESTS "
                "= %s counts when it is full and goes on in a further one",
                f"{capacity:,}",
                f"{policy.expected:,}",
            )
        error_rate = sum(each.error_rate for each in self._live)
        if policy.is_exceeded(error_rate):
            logger.info(
                "The filter keeps the error rate that its files were made for, %.2g; "
                "BLOOM_ERROR_RATE = %g is for the files that it grows by, and for a new filter",
                error_rate,
                policy.error_rate,
            )

    def _warn_if_the_clock_went_back(self) -> None:
        behind = self._newest.created_at - self._clock()
        if behind > 1:
            logger.warning(
                "The clock is %.0f seconds behind the time when the filter was last extended: "
                "requests are remembered for that much longer than BLOOM_WINDOW_SECS",
                behind,
            )

    def _save(self) -> None:
        if self._store is not None:
            self._next_save = self._store.save()


def notes_in_memory() -> LocalBackend:
    """Make an opened filter for what a run notes beside its own: 10 MB for a million requests."""
    new = LocalBackend(None, capacity=20_000, error_rate=1e-12)  # it errs next to never
    new.open()
    return new
