"""The errors that scrapy_bloom raises.

    BloomError
      SettingError (also ValueError)           a BLOOM_* setting of a wrong type or out of range
      GeometryMismatchError (also ValueError)  two filters that cannot be combined
      SeenFileError                            a requests.seen file in neither of Scrapy's formats
      StorageError                             the directory or server cannot be used
        LockedError                            ... because a running crawl holds it
        FilterFileError                        ... because of a filter file that cannot be trusted
        FingerprinterMismatchError             ... because other fingerprints are recorded in it
        UncleanShutdownError                   ... because the last run did not close it
        OutageError                            ... because Redis is out of reach
        RefusedError                           ... because Redis refuses what it is asked

Each message is one line that names the setting or file, says what is wrong with it, and what
to do next.
"""

from scrapy_bloom.text import escaped


class BloomError(Exception):
    """Base of every error that scrapy_bloom raises on purpose.

    Attributes:
        is_logged: whether the log has it already.
    """

    is_logged = False

    def __str__(self) -> str:
        """Return the message; what it quotes of files or servers cannot harm terminal or log."""
        return escaped(super().__str__())


class SettingError(BloomError, ValueError):
    """A BLOOM_* setting is unknown, of a wrong type or out of range."""


class GeometryMismatchError(BloomError, ValueError):
    """Two filters differ in size, number of hashes, hash scheme or salt."""


class SeenFileError(BloomError):
    """A requests.seen file is in neither of the two formats that Scrapy has written."""


class StorageError(BloomError):
    """The place of a filter, a directory or a server, cannot be read, written or extended."""


class LockedError(StorageError):
    """Another running crawl uses the directory."""


class FilterFileError(StorageError):
    """A filter file is truncated, foreign, damaged or of a newer format."""


class FingerprinterMismatchError(StorageError):
    """A filter was recorded under another REQUEST_FINGERPRINTER_CLASS."""

    @classmethod
    def of(
        cls, name: object, there: str, here: str, otherwise: str
    ) -> "FingerprinterMismatchError":
        """Return the error of a crawl: a filter's name, both classes, and what it may use."""
        return cls(
            f"{name} was recorded with REQUEST_FINGERPRINTER_CLASS = {there!r}, and this crawl has "
            f"{here!r}: no request would be found in it; set REQUEST_FINGERPRINTER_CLASS back, or "
            f"use {otherwise}"
        )


class UncleanShutdownError(StorageError):
    """The last run did not close the filter, and BLOOM_ON_UNCLEAN_SHUTDOWN is "stop"."""


class OutageError(StorageError):
    """Redis could not be reached within BLOOM_REDIS_DEADLINE_SECS, or not yet again.

    Or another crawler kept us from using the filter for that long.

    Attributes:
        since: when the outage began, on a monotonic clock: the same for all errors of one.
        until: what ends it, for people.
    """

    def __init__(
        self, message: str, *, since: float = 0.0, until: str = "the server is back"
    ) -> None:
        super().__init__(message)
        self.since = since
        self.until = until


class RefusedError(StorageError):
    """Redis refuses, and would again: a right is missing, or the key holds something else."""
