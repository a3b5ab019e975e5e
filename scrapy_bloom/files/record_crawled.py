"""A filter that records what was crawled, not what was scheduled (BLOOM_RECORD_ON)."""

from dataclasses import replace

from scrapy_bloom.files.backend import LocalBackend
from scrapy_bloom.generations.status import FilterStatus


class RecordCrawled:
    """Two backends in one: new requests go into memory, crawled ones are kept for later runs.

    So later runs filter neither what a killed run had queued, nor what failed.

    Attributes:
        stored: what is kept for later runs.
        scheduled: how many requests were new in this run.
    """

    def __init__(self, stored: LocalBackend, volatile: LocalBackend) -> None:
        self.scheduled = 0
        self.stored = stored
        self._volatile = volatile
        self.forgotten = stored.forgotten
        self._once_more: set[bytes] = set()  # forgotten, and scheduled since; no more than queued
        self.begin = stored.begin
        self.keeps_newest = volatile.keeps_newest

    def open(self) -> None:
        """Open both."""
        self._volatile.open()
        self.stored.open()

    def add(self, fingerprint: bytes) -> bool:
        """Record a fingerprint for this run; True if it was new to this and all earlier ones."""
        if self.forgotten.take(fingerprint):
            self._volatile.add(fingerprint)  # if it is not there
            self._once_more.add(fingerprint)
        elif fingerprint in self.stored or not self._volatile.add(fingerprint):
            return False
        self.scheduled += 1
        return True

    def record(self, fingerprint: bytes) -> bool:
        """Record a fingerprint for later runs; True if it was not yet, or had been forgotten."""
        is_new = self.stored.add(fingerprint)
        if fingerprint in self._once_more:
            self._once_more.discard(fingerprint)
            self.stored.record_anew(fingerprint)
            return True
        return is_new

    def __contains__(self, fingerprint: bytes) -> bool:
        is_recorded = fingerprint in self.stored or fingerprint in self._volatile
        return is_recorded and fingerprint not in self.forgotten

    def status(self) -> FilterStatus:
        """Return the figures of what is stored, with the error rate of both."""
        stored, volatile = self.stored.status(), self._volatile.status()
        return replace(
            stored,
            volatile=[*stored.volatile, *volatile.volatile, *volatile.generations],
            error_rate=stored.error_rate + volatile.error_rate,
        )

    def close(self) -> None:
        """Close both; raises BloomError."""
        self._volatile.close()
        self.stored.close()
