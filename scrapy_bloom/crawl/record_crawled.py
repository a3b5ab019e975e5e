"""Recording a request for later runs only when it has been crawled (BLOOM_RECORD_ON)."""

from dataclasses import replace

from scrapy_bloom.files.backend import LocalBackend
from scrapy_bloom.generations.status import FilterStatus


class RecordCrawled:
    """Two backends in one: new requests go into memory, crawled ones are kept for later runs.

    Neither a killed run nor a failed page leaves anything for later runs to see.

    Attributes:
        stored: what later runs will see.
        scheduled: new requests in this run.
    """

    def __init__(self, stored: LocalBackend, volatile: LocalBackend) -> None:
        self.scheduled = 0
        self.stored = stored
        self._volatile = volatile
        self.forgotten = stored.forgotten
        self.begin = stored.begin
        self.record = stored.add  # for later runs; True if it was not yet

    def open(self) -> None:
        """Open both."""
        self._volatile.open()
        self.stored.open()

    def add(self, fingerprint: bytes) -> bool:
        """Record a fingerprint for this run; True if it was new to this and all earlier ones."""
        if self.forgotten.take(fingerprint):
            self._volatile.add(fingerprint)  # if it is not there
        elif fingerprint in self.stored or not self._volatile.add(fingerprint):
            return False
        self.scheduled += 1
        return True

    def __contains__(self, fingerprint: bytes) -> bool:
        if fingerprint in self.forgotten:
            return False
        return fingerprint in self.stored or fingerprint in self._volatile

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
