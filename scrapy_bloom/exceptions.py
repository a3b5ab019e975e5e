"""The errors that scrapy_bloom raises.

    BloomError
      SettingError (also ValueError)           a BLOOM_* setting of a wrong type or out of range
      SeenFileError                            a requests.seen file in neither of Scrapy's formats
      StorageError                             the directory or server cannot be used
        LockedError                            ... because a running crawl holds it
        FingerprinterMismatchError             ... because other fingerprints are recorded in it
        UncleanShutdownError                   ... because its last crawl did not close it
        OutageError                            ... because Redis is out of reach
        RefusedError                           ... because Redis refuses what it is asked

Each message is one line. It names the setting or file, and says what is wrong with it and what to
do next. docs/troubleshooting.md explains each.
"""

from scrapy_bloom.text import escaped


class BloomError(Exception):
    """Base class of all errors that scrapy_bloom raises.

    Attributes:
        is_logged: whether the error is in the log already.
    """

    is_logged = False

    def __str__(self) -> str:
        """Return the message. Control characters from files and servers are escaped."""
        return escaped(super().__str__())


class SettingError(BloomError, ValueError):
    """A setting is invalid, or the crawl cannot run with it: a package or a feature is missing."""


class SeenFileError(BloomError):
    """A requests.seen file is in neither of the two formats that Scrapy has written."""


class StorageError(BloomError):
    """A directory or a server cannot be read, written or extended."""


class LockedError(StorageError):
    """Another running crawl uses the directory."""


class FingerprinterMismatchError(StorageError):
    """A filter was recorded under another REQUEST_FINGERPRINTER_CLASS."""

    @classmethod
    def of(
        cls, name: object, there: str, here: str, otherwise: str
    ) -> "FingerprinterMismatchError":
        """Return the error of a crawl, with what the user can do otherwise."""
        return cls(
            f"{name} was recorded with REQUEST_FINGERPRINTER_CLASS = {there!r}, and this crawl has "
            f"{here!r}: no request would be found in it; set REQUEST_FINGERPRINTER_CLASS back, or "
            f"use {otherwise}"
        )


class UncleanShutdownError(StorageError):
    """A command cannot use a filter that a crawl uses, or that its last crawl did not close."""


class OutageError(StorageError):
    """Redis, or the filter in it, could not be used within BLOOM_REDIS_DEADLINE_SECS.

    Attributes:
        since: when the outage began, on a monotonic clock; all errors of an outage have the same.
    """

    def __init__(self, message: str, *, since: float = 0.0) -> None:
        super().__init__(message)
        self.since = since


class RefusedError(StorageError):
    """Redis refuses, and would refuse again: a right is missing, or the key has other content."""
