"""The backend of a crawl: what each must offer, wherever it keeps the filter."""

from typing import Protocol

from scrapy_bloom.generations.forgotten import Forgotten
from scrapy_bloom.generations.status import FilterStatus


class Backend(Protocol):
    """Keeps a filter for a crawl.

    It takes fingerprints, never URLs, and is used in this order: `open`, `begin`, any number of
    `add`, `close`.
    """

    @property
    def forgotten(self) -> Forgotten:
        """Return the requests that are to be crawled again."""

    def open(self) -> None:
        """Make the filter ready, leaving what is stored as it is; raises BloomError."""

    def begin(self) -> None:
        """Begin the crawl: from now to `close`, its end counts as unclean."""

    def add(self, fingerprint: bytes) -> bool:
        """Record a fingerprint; True if it was new."""

    def __contains__(self, fingerprint: bytes) -> bool:
        """Return whether a fingerprint is recorded (or, at the error rate, seems to be)."""

    def keeps_newest(self) -> bool:
        """Return whether what is recorded now is known to the end of this run, with any window."""

    def status(self) -> FilterStatus:
        """Return the filter's figures now; after `close`, the last ones."""

    def close(self) -> None:
        """Make everything durable and end; the last call. Raises BloomError."""
