"""The destination of `scrapy bloom import`: whether it fits, and what a failure leaves of it."""

import argparse
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from scrapy.exceptions import UsageError

from scrapy_bloom.exceptions import LockedError
from scrapy_bloom.generations.policy import Generation, rate_asked
from scrapy_bloom.job import paths as jobdir
from scrapy_bloom.job.locks import LOCK_NAME
from scrapy_bloom.settings.settings import BloomSettings


def check_size(
    options: argparse.Namespace, bloom: BloomSettings, live: Sequence[Generation], said: float
) -> None:
    """Check that a filter is as large and as exact as the options say: it cannot be changed.

    What it says itself of the error rate that it was made for is given, 0 if nothing.
    """
    room = live[-1].capacity if bloom.window_secs else sum(each.capacity for each in live)
    asked = replace(bloom, on_full="grow").policy.first()
    if options.expected_requests and room < asked.capacity:
        raise UsageError(
            "--expected-requests is for a new filter: DEST has one already, for fewer requests. "
            "Leave the option out (the filter grows when it is full), or give another DEST"
        )
    rate = rate_asked(live, said)
    if options.error_rate and rate > float(f"{bloom.error_rate:.9g}"):
        raise UsageError(
            f"--error-rate is for a new filter: DEST has one already, for {rate:g}. Leave the "
            "option out, or give another DEST"
        )


def missing_paths(directory: Path) -> list[Path]:
    """Return what a new filter consists of, and is not there yet: files before directories."""
    files = (directory / jobdir.file_name(1), directory / LOCK_NAME)
    return [path for path in (*files, directory, *directory.parents) if not path.exists()]


def remove_after_error(new: list[Path], kind: type[BaseException] | None, *_: object) -> None:
    """Remove what was not there before an import that has failed."""
    if kind is None or issubclass(kind, LockedError):  # then they are somebody else's
        return
    for path in new:
        with suppress(OSError):  # others have put something into the directory
            path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)
