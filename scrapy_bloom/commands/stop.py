"""Stop the workers of a crawl, as Ctrl-C does, and wait until they have ended.

In Redis, the command asks all workers that share the queue now, on whatever
machine they run. For a JOBDIR, it interrupts the process on this machine that
uses it. To resume the crawl, start it with the same command again.

Examples:
  scrapy bloom stop jobs/shop
  scrapy bloom stop redis://localhost:6379/0#shop:bloom
"""

import argparse
import time
from collections.abc import Sequence

from scrapy.settings import Settings

from scrapy_bloom.commands.shared.arguments import add_place
from scrapy_bloom.commands.shared.figures import read_queue
from scrapy_bloom.commands.shared.opening import opened_place
from scrapy_bloom.commands.shared.output import note, say
from scrapy_bloom.commands.shared.place import Place
from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.queues.store import Worker
from scrapy_bloom.text import counted

_POLL_SECS = 0.25
_NOTE_SECS = 10.0  # until the command says for whom it waits, and again


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_place(parser, is_optional=True)


def run(options: argparse.Namespace, settings: Settings) -> None:
    with opened_place(options, settings) as (place, _):
        left = _alive(place)
        if not left:
            say(f"No crawl uses {place.name}{_pending(place)}")
            return
        workers, names = counted(len(left), "worker"), {worker.name for worker in left}
        asked = set[str]()
        note(f"Asking {workers} to end: {', '.join(sorted(names))}")
        due = time.monotonic() + _NOTE_SECS
        while left:
            # A worker that has joined again has another id.
            place.stop([worker for worker in left if worker.id not in asked])
            asked |= {worker.id for worker in left}
            if time.monotonic() > due:
                note(
                    f"Waiting for {', '.join(worker.name for worker in left)} (a killed worker "
                    "counts until its lease expires, BLOOM_QUEUE_LEASE_SECS)"
                )
                due = time.monotonic() + _NOTE_SECS
            time.sleep(_POLL_SECS)
            left = [worker for worker in _alive(place) if worker.name in names]
        say(f"{workers} of {place.name} ended{_pending(place)}")


def _alive(place: Place) -> Sequence[Worker]:
    if (workers := place.workers()) is None:
        raise StorageError(
            f"the process that uses {place.name} cannot be found from here (it may run in another "
            "container, or this system has no /proc/locks); end it by Ctrl-C, or send it SIGINT"
        )
    return [worker for worker in workers if worker.is_alive]


def _pending(place: Place) -> str:
    if (queue := read_queue(place)) is None:
        return ""
    return f"; {counted(queue.left, 'request is', 'requests are')} pending"
