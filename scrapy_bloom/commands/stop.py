"""Stop the workers of a crawl, as Ctrl-C does, and wait until they have ended.

In Redis, the command asks all workers that share the queue now, on whatever machine they run. For
a JOBDIR, it interrupts the process on this machine that uses it. The pending requests stay in the
queue: to resume the crawl, start it with the same command again.

Examples:
  scrapy bloom stop jobs/shop
  scrapy bloom stop redis://localhost:6379/0 --key shop:bloom
"""

import argparse
import time
from collections.abc import Sequence

from scrapy.settings import Settings

from scrapy_bloom.commands.shared.arguments import add_place
from scrapy_bloom.commands.shared.figures import left_in
from scrapy_bloom.commands.shared.output import note, say
from scrapy_bloom.commands.shared.places import Place, opened_place
from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.queues.store import Worker
from scrapy_bloom.text import counted, rough_duration_text

_POLL_SECS = 0.25
_FIRST_NOTE_SECS, _NOTE_SECS = 2.0, 10.0  # until the command says for whom it waits, and again


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the subcommand."""
    add_place(parser, is_optional=True)


def run(options: argparse.Namespace, settings: Settings) -> None:
    """Stop the workers of a crawl."""
    with opened_place(options.place, settings) as place:
        left = _alive(place)
        if not left:
            say(f"No crawl uses {place.name}{_pending(place)}")
            return
        workers = counted(len(left), "worker")
        last = {each.name: each for each in left}  # as it was seen last
        asked = set[str]()
        note(f"Asking {workers} to end: {', '.join(sorted(last))}")
        due = time.monotonic() + _FIRST_NOTE_SECS
        while left:
            # A worker that has joined again has another id.
            place.stop([each for each in left if each.id not in asked])
            asked |= {each.id for each in left}
            if time.monotonic() > due:
                note(f"Waiting for {'; '.join(map(_expected, left))}")
                due = time.monotonic() + _NOTE_SECS
            time.sleep(_POLL_SECS)
            left = [each for each in _alive(place) if each.name in last]
            last |= {each.name: each for each in left}
        killed = sum(each.is_silent for each in last.values())
        how = f" ended, {killed:,} of them killed" if killed else " ended"
        say(f"{workers} of {place.name}{how}{_pending(place)}")


def _expected(worker: Worker) -> str:
    """Describe a worker that has not ended, and say how long that may take."""
    if not worker.is_silent:
        return f"{worker.name}, with {counted(worker.in_flight, 'request')} in flight"
    silent, lease = worker.heartbeat_secs or 0.0, worker.lease_secs or 0.0
    return (
        f"{worker.name}, silent for {rough_duration_text(silent)}, perhaps killed: for at most "
        f"{rough_duration_text(lease - silent)}"
    )


def _alive(place: Place) -> Sequence[Worker]:
    if (workers := place.workers()) is None:
        raise StorageError(
            f"the process that uses {place.name} cannot be found from here (it may run in another "
            "container, or this system has no /proc/locks); end it by Ctrl-C, or send it SIGINT"
        )
    return [each for each in workers if each.is_alive]


def _pending(place: Place) -> str:
    if (queue := place.find_queue()) is None:
        return ""
    number = left_in(queue.counts())
    return f"; {counted(number, 'request is', 'requests are')} pending"
