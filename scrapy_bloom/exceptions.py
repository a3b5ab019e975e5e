"""The errors that scrapy_bloom raises, and the address of the page that explains them.

    BloomError
      SettingError (also ValueError)           a BLOOM_* setting of a wrong type or out of range
      GeometryMismatchError (also ValueError)  two filters that cannot be combined
      SeenFileError                            a requests.seen file in neither of Scrapy's formats
      StorageError                             the directory or server cannot be used
        LockedError                            ... because a running crawl holds it
        FilterFileError                        ... because of a filter file that cannot be trusted
        FingerprinterMismatchError             ... because other fingerprints are recorded in it
        UncleanShutdownError                   ... because its last crawl did not close it
        OutageError                            ... because Redis is out of reach
        RefusedError                           ... because Redis refuses what it is asked

Each message is one line. It names the setting or file, and says what is wrong with it and what to
do next.
"""

import re
from importlib import resources

from scrapy_bloom.text import escaped

_PAGE = "troubleshooting.md"  # of the documentation; a link in this package
TROUBLESHOOTING = f"https://github.com/scrapy-bloom/scrapy-bloom/blob/main/docs/{_PAGE}"


class BloomError(Exception):
    """Base class of all errors that scrapy_bloom raises.

    Attributes:
        is_logged: whether the error is in the log already.
    """

    is_logged = False

    def __str__(self) -> str:
        """Return the message. Control characters from files and servers are escaped."""
        return escaped(super().__str__())

    @property
    def address(self) -> str:
        """The address of the section that explains the error.

        It is printed after an error that ends a command or prevents a crawl. The page lists each
        message, with an ellipsis in place of each value. The longest one that fits is meant.
        """
        heading, found, most = "", "", 0
        try:
            page = resources.files(__package__).joinpath(_PAGE).read_text("utf-8")
        except OSError:  # the package was installed without it
            page = ""
        for line in page.splitlines():
            if line.startswith("#"):
                heading = re.sub(r"[^\w -]", "", line.lstrip("# ").lower()).replace(" ", "-")
            elif line.startswith("- `"):
                parts = line[2:].strip("` ").split("…")
                if most < (length := sum(map(len, parts))) and _has_all(str(self), parts):
                    found, most = f"#{heading}", length
        return TROUBLESHOOTING + found


def _has_all(text: str, parts: list[str]) -> bool:
    """Return whether a text has these parts in this order."""
    at = 0
    for part in parts:
        if (at := text.find(part, at)) < 0:
            return False
        at += len(part)
    return True


class SettingError(BloomError, ValueError):
    """A setting is invalid, or the crawl cannot run with it: a package or a feature is missing."""


class GeometryMismatchError(BloomError, ValueError):
    """Two filters differ in size, number of hashes, hash scheme or salt."""


class SeenFileError(BloomError):
    """A requests.seen file is in neither of the two formats that Scrapy has written."""


class StorageError(BloomError):
    """A directory or a server cannot be read, written or extended."""


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
        """Return the error of a crawl.

        Args:
            name: the name of the filter, for the message.
            there: the fingerprinter class of the filter.
            here: the fingerprinter class of the crawl.
            otherwise: what the user can do instead, for the message.
        """
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
    """Redis refuses, and would refuse again: a right is missing, or the key has other content.

    Or the disk of the filter has no room left, and must not be written to.
    """
