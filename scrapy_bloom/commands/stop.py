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

from scrapy_bloom.commands.shared.cli import add_shared, note, say
from scrapy_bloom.commands.shared.figures import counts_text, read_queue
from scrapy_bloom.commands.shared.places import Place, opened_place
from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.queues.store import Worker
from scrapy_bloom.text import counted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_shared(parser, "[place]", "--spider")


def run(options: argparse.Namespace, settings: Settings) -> None:
    with opened_place(options, settings) as (place, _):
        running = _alive(place)
        workers, names = counted(len(running), "worker"), {worker.name for worker in running}
        if running:
            note(
                f"Asking {workers} to end, and waiting: {', '.join(sorted(names))} (a killed "
                "worker counts until its lease expires, BLOOM_QUEUE_LEASE_SECS)"
            )
        asked = set[str]()
        while running:
            # A worker that has joined again has another id.
            place.stop([worker for worker in running if worker.id not in asked])
            asked |= {worker.id for worker in running}
            time.sleep(0.25)
            running = [worker for worker in _alive(place) if worker.name in names]
        ended = f"{workers} of {place.name} ended" if names else f"No crawl uses {place.name}"
        queue = read_queue(place)
        say(f"{ended}; {counts_text(queue)}" if queue else ended)


def _alive(place: Place) -> Sequence[Worker]:
    if (workers := place.workers()) is None:
        raise StorageError(
            f"the process that uses {place.name} cannot be found from here (it may run in another "
            "container, or this system has no /proc/locks); end it by Ctrl-C, or send it SIGINT"
        )
    return [worker for worker in workers if worker.is_alive]
