"""Figures of a filter that a command has made, filled or copied."""

import argparse
from pathlib import Path
from typing import Any

from scrapy_bloom.commands.shared.output import note, print_json, say
from scrapy_bloom.copying.transfer import Copied
from scrapy_bloom.files.directory import filter_directory
from scrapy_bloom.generations.backend import FilterStatus
from scrapy_bloom.queues.conflicts import has_waiting
from scrapy_bloom.text import counted, number_text, size_text


def tell_changed(
    options: argparse.Namespace, status: FilterStatus, directory: Path | None, **more: Any
) -> None:
    """Print what a filter is after a change, and how a crawl finds it in its directory, if any.

    With --json, `more` are the figures that come before its own.
    """
    location = str(directory or status.location)
    if options.json:
        print_json(
            {
                **more,
                "destination": location,
                "recorded": status.count,
                "capacity": status.capacity,
                "bytes": status.nbytes,
                "generations": len(status.generations),
                "error_rate_now": status.error_rate_now,
            }
        )
        return
    say(
        f"The filter in {location} has {status.count:,} of "
        f"{counted(status.capacity, 'request')} in {size_text(status.nbytes)}, "
        f"error rate now {number_text(status.error_rate_now, 2)}"
    )
    if directory:
        say_where(directory)


def tell_copied(options: argparse.Namespace, copied: Copied, destination: str) -> None:
    """Print what was copied."""
    if options.json:
        print_json(
            {
                "destination": destination,
                "recorded": copied.requests,
                "generations": copied.generations,
                "bytes": copied.nbytes,
                "crc32": f"{copied.checksum:08x}",
                "queue": None if copied.queued is None else {"requests": copied.queued},
            }
        )
        return
    say(
        f"Copied to {destination}: {counted(copied.requests, 'request')}, "
        f"{counted(copied.generations, 'generation')}, {size_text(copied.nbytes)}; read "
        "back and compared"
    )
    if copied.queued is not None:
        say(f"And its queue: {counted(copied.queued, 'request')}")


def say_where(directory: Path) -> None:
    """Say how a crawl finds a filter."""
    if directory.name != "bloom":
        note(
            f"Crawls use it with BLOOM_DIR = {str(directory)!r}. (A crawl with a JOBDIR and no "
            "BLOOM_DIR has its filter in JOBDIR/bloom)"
        )


def warn_of_queue(path: Path) -> None:
    """Say so if requests that a filter holds wait in its job's queue, which was not copied."""
    directory = filter_directory(path)
    job_dir = directory.parent
    if directory.name == "bloom" and has_waiting(job_dir):
        note(
            f"scrapy bloom: warning: requests that are recorded in {directory} wait in the queue "
            f"of {job_dir}, and are not crawled yet. A crawl with the copy takes them for seen: "
            f"let that job finish first, or let one crawl with the copy have {job_dir} as JOBDIR"
        )


def warn_of_overfull(status: FilterStatus) -> None:
    """Say so if a generation holds more than it was made for."""
    if overfull := [
        generation for generation in status.generations if generation.count > generation.capacity
    ]:
        requests = counted(overfull[0].count, "request is", "requests are")
        note(
            f"scrapy bloom: warning: {requests} in a generation that was "
            f"made for {overfull[0].capacity:,}: the error rate is {status.error_rate_now:.2g} "
            f"now, and {status.error_rate:.2g} was asked for; make filters that will be merged "
            "for the requests of all of them together"
        )
