"""The filter of one machine: files in the job directory, or memory alone."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from scrapy_bloom.files import forgotten as forgotten_file
from scrapy_bloom.files.forgotten import ForgottenFile
from scrapy_bloom.files.generations import FileGenerations
from scrapy_bloom.files.local import LocalGeneration, MemoryGenerations
from scrapy_bloom.files.log import FilterLog
from scrapy_bloom.files.overlay import ForgottenOverlay, Overlay
from scrapy_bloom.generations.forgotten import Forgotten
from scrapy_bloom.generations.lifecycle import LifeCycle
from scrapy_bloom.generations.lookup import Lookup, Recent
from scrapy_bloom.generations.policy import ANY_ORIGIN, Origin, Policy
from scrapy_bloom.generations.status import FilterStatus
from scrapy_bloom.job.recovery import Job
from scrapy_bloom.text import counted

logger = logging.getLogger(__name__)

# The navigation of a large site many times over, in at most 0.4 MB.
_MOST_RECENT = 2048
_MOST_UNAPPLIED = 50_000  # changes in memory, some 10 MB; a checkpoint is made sooner then


class LocalBackend:
    """A Bloom filter in a directory, or in memory if there is none.

    Args:
        directory: where the filter's files are, or None for memory only.
        policy: how large it is, and when it grows and forgets.
        origin: what it holds, and whose.
        job: the crawl's job directory, whose requests.seen is imported into a new filter. It says
            what to do with a filter that its last run did not close.
        sync_secs: seconds between writes of what changed to the disk, against a power loss;
            0: at close only.
        is_crawl: False if no crawl uses it. A kill then leaves no request that is recorded but not
            crawled, and the files do not say that they are in use.
        claims: a forgotten request that is crawled again stays forgotten until it has ended, since
            the queue dies with this run.
        clock: seconds since 1970, for tests.

    Attributes:
        forgotten: the requests that are to be crawled again.
        overlay: what is recorded and forgotten, until the filter's log has it; None without one.
    """

    def __init__(
        self,
        directory: Path | None,
        policy: Policy,
        origin: Origin = ANY_ORIGIN,
        *,
        job: Job | None = None,
        sync_secs: float = 30.0,
        is_crawl: bool = True,
        claims: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._policy = policy
        self._origin = origin = replace(origin, error_rate=policy.error_rate)
        self._clock = clock
        self._is_crawl = is_crawl
        self._store = MemoryGenerations(policy, origin, clock=clock, changed=self._changed)
        path = None
        if directory is not None:
            path = directory / forgotten_file.NAME
            self._store = FileGenerations(
                directory,
                policy,
                origin,
                job=job or Job(),
                sync_secs=sync_secs,
                is_crawl=is_crawl,
                clock=clock,
                changed=self._changed,
            )
        self._forgotten_file = ForgottenFile(path, claims=claims)
        self.forgotten = Forgotten(self._forgotten_file)
        self._life = LifeCycle(policy, self._store, self.forgotten)
        self._last_status: FilterStatus | None = None
        self._recent = Recent(_MOST_RECENT)
        self.overlay: Overlay | None = None
        self._lookup: Lookup | Overlay
        self._record: Callable[[bytes], bool]
        self._keep: Callable[[bytes], object]
        self._newest: LocalGeneration

    def open(self, log: FilterLog | None = None) -> None:
        """Lock the directory and open or create the filter in it; or leave all as it was.

        Nothing is recorded as in use yet: until `begin`, a crash leaves a closed filter closed.

        Args:
            log: of a filter in files, opened: all changes go there first. Those that it has and
                the filter lacks are made now.

        Raises:
            StorageError: or one of its children: see `scrapy_bloom.exceptions`.
            SeenFileError: the job's requests.seen cannot be imported.
        """
        try:
            self._store.open(log)
            self.forgotten.open()
            if self._store.live:
                self._log_what_is_kept()
            else:
                self._store.make_first()
            if log is not None:
                self._use_log(log)
        except BaseException:
            self._store.unlock()
            raise
        self._changed()

    def _use_log(self, log: FilterLog) -> None:
        """Recover: take over from the log what the filter lacks, and have the log record first."""
        store = self._store
        assert isinstance(store, FileGenerations)
        log.begin()
        log.sync()
        store.note_open(log)
        self._changed()
        latest: dict[bytes, bool] = {}
        for _, changes in log.changes():
            for forgets, fingerprint in changes:
                if forgets is not None:
                    latest[fingerprint] = forgets
                if not forgets:
                    self._record_now(fingerprint)
        if store.misfit:
            for fingerprint in log.unfinished():
                latest[fingerprint] = False
                self._record_now(fingerprint)
        self._forgotten_file.change(latest)
        self.overlay = store.lay_over(log)
        self.forgotten.use(ForgottenOverlay(self._forgotten_file, self.overlay))

    def _record_now(self, fingerprint: bytes) -> None:
        life = self._life
        if self._newest.count >= life.grow_at and fingerprint not in self._lookup:
            life.grow()
        # With a window, one that an older generation has is to be remembered from then on.
        record = self._keep if self._policy.window else self._record
        if record(fingerprint):
            self._newest.count += 1

    def begin(self) -> None:
        """Note on the disk that the filter is in use: a run that finds that knows of a kill."""
        store = self._store
        if store.begun:
            return
        store.begin()
        if self._policy.window:
            self._warn_if_the_clock_went_back()
            # If the window was shortened, so is what is left of the quarter.
            store.extend(min(self._newest.open_until, self._policy.open_until(store.now())))
            self._life.turn()
            if self._is_crawl:
                store.run.begin(self._newest.number, store.now())
        elif self._newest.open_until:
            store.extend(0.0)  # there is no window any more

    def add(self, fingerprint: bytes) -> bool:
        """See `Backend`."""
        store, life = self._store, self._life
        if not store.begun:
            self.begin()
        if life.has_window and self._clock() >= life.due_at:
            life.turn()
        if fingerprint in self._recent:
            return self._is_new_once_more(fingerprint)
        if self._newest.count >= life.grow_at:
            if fingerprint in self._lookup:
                return self._is_new_once_more(fingerprint)
            life.grow()
        if not self._record(fingerprint):
            self._recent.note(fingerprint)
            return self._is_new_once_more(fingerprint)
        if not self.forgotten.is_empty:
            self.forgotten.take(fingerprint)  # new it is anyway, and once
        newest = self._newest
        newest.count += 1
        if newest.count >= store.next_save:
            store.save()
            if self.overlay is not None and len(self.overlay) >= _MOST_UNAPPLIED:
                store.checkpoint_soon()
        return True

    def add_many(self, fingerprints: Sequence[bytes]) -> int:
        """Record fingerprints; return how many were new."""
        return sum(map(self.add, fingerprints))

    def _is_new_once_more(self, fingerprint: bytes) -> bool:
        """Return whether a recorded fingerprint was forgotten, and take it out."""
        if not self.forgotten.take(fingerprint):
            return False
        self.record_anew(fingerprint)
        return True

    def record_anew(self, fingerprint: bytes) -> None:
        """Record what an older generation has in the newest one, too: for a window from now on."""
        if self._policy.window and fingerprint not in self._newest.filter:
            self._keep(fingerprint)
            self._newest.count += 1

    def __contains__(self, fingerprint: bytes) -> bool:
        life = self._life
        if life.has_window and self._store.begun and self._clock() >= life.due_at:
            life.turn()
        return fingerprint in self._lookup and fingerprint not in self.forgotten

    def keeps_newest(self) -> bool:
        """See `Backend`."""
        return not self._policy.window or self._store.run.keeps(self._newest)

    def close(self) -> None:
        """Write all to the disk, note that it is closed, and unlock it; raises StorageError."""
        self._last_status = self.status()
        try:
            self.forgotten.close()
        finally:
            self._store.close()

    def status(self) -> FilterStatus:
        """See `Backend`."""
        if self._last_status is not None:
            return self._last_status
        store = self._store
        return self._life.status(
            store.location, store.live, errors=store.errors, failure=store.failure
        )

    def _changed(self) -> None:
        """Ask and record in the new list of generations from now on."""
        self._recent.clear()
        store = self._store
        self._newest = newest = store.live[-1]
        asked = [*store.kept, *store.live]
        self._lookup = lookup = Lookup([each.filter for each in asked])
        self._keep = newest.filter.add
        self._record = lookup.add if len(asked) > 1 else newest.filter.add
        if (overlay := self.overlay) is not None:
            overlay.lie_over(lookup, newest)
            self._lookup, self._record, self._keep = overlay, overlay.add, overlay.keep
        self._life.plan()
        if store.begun:
            store.save()

    def _log_what_is_kept(self) -> None:
        policy, live = self._policy, self._store.live
        if self._origin.salt not in {None, live[0].filter.salt}:
            logger.info("The filter keeps the salt it was made with; BLOOM_SALT is for a new one")
        capacity = sum(each.capacity for each in live)
        if not policy.window and policy.expected > capacity:
            logger.info(
                "The filter was made for %s and keeps its files; BLOOM_EXPECTED_REQUESTS "
                "= %s counts when it is full and goes on in a further one",
                counted(capacity, "request"),
                f"{policy.expected:,}",
            )
        error_rate = sum(each.error_rate for each in live)
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


def notes_in_memory() -> LocalBackend:
    """Make an opened filter for what a run notes beside its own: 10 MB for a million requests."""
    new = LocalBackend(None, Policy(expected=20_000, error_rate=1e-12))  # it errs next to never
    new.open()
    return new
