"""Stop the workers of a crawl, as Ctrl-C does, and wait until they have ended.

In Redis, the command asks all workers that share the queue now, on whatever machine they run. For
a JOBDIR, it interrupts the process on this machine that uses it. The pending requests stay in the
queue: to resume the crawl, start it with the same command again.

Examples:
  scrapy bloom stop jobs/shop
  scrapy bloom stop redis://localhost:6379/0 --key shop:bloom
  scrapy bloom stop redis://localhost:6379/0 --key shop:bloom --no-wait
"""

import argparse
import os
import signal
import time
from pathlib import Path

from scrapy.settings import Settings

from scrapy_bloom.commands.shared.arguments import add_place
from scrapy_bloom.commands.shared.figures import Figures, queue_figures
from scrapy_bloom.commands.shared.output import note, say, working
from scrapy_bloom.commands.shared.project import opened_place, place_name
from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.job.jobdir import LOCK_NAME, holders
from scrapy_bloom.queues.shared_state import stop_workers
from scrapy_bloom.redis.stored import RedisPlace
from scrapy_bloom.text import counted

_POLL_SECS = 0.25


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the subcommand."""
    add_place(parser, is_optional=True)
    parser.add_argument("--no-wait", action="store_true", help="do not wait until they have ended")


def run(options: argparse.Namespace, settings: Settings) -> None:
    """Stop the workers of a crawl."""
    with opened_place(options, settings) as place:
        if isinstance(place, Path):
            _stop_process(place, wait=not options.no_wait)
        else:
            _stop_workers(place, wait=not options.no_wait)


def _stop_workers(place: RedisPlace, *, wait: bool) -> None:
    def alive(queue: Figures | None) -> list[str]:
        if queue is None:
            raise StorageError(
                f"{place.server.address} has no queue {place.key!r}; no worker was stopped"
            )
        return [each["name"] for each in queue["workers"] if each["is_alive"]]

    name, queue = place_name(place), queue_figures(place)
    names = left = alive(queue)
    if not names:
        say(f"No worker uses the queue {name}{_pending(queue)}")
        return
    workers = counted(len(names), "worker")
    note(f"Asking {workers} to end: {', '.join(names)}")
    with working("Waiting until they have ended"):
        while left:
            # Repeated, because a worker that has joined again has another id.
            stop_workers(place.server, place.key, left)
            if not wait:
                say(f"{workers} of the queue {name} will end")
                return
            time.sleep(_POLL_SECS)
            queue = queue_figures(place)
            left = [each for each in alive(queue) if each in names]
    say(f"{workers} of the queue {name} ended{_pending(queue)}")


def _pending(queue: Figures | None) -> str:
    if queue is None:
        return ""
    number = queue["pending"] + queue["in_flight"]
    return f"; {counted(number, 'request is', 'requests are')} pending"


def _stop_process(path: Path, *, wait: bool) -> None:
    locks = [lock for lock in (path / "bloom" / LOCK_NAME, path / LOCK_NAME) if lock.exists()]
    if not locks:
        raise StorageError(f"{path} holds no job and no filter; give a JOBDIR or a BLOOM_DIR")
    process = _holder(locks[0])
    if process:
        os.kill(process, signal.SIGINT)
        if not wait:
            say(f"The process {process} that uses {path} will end")
            return
        with working("Waiting until it has ended"):
            while _holder(locks[0]) == process:
                time.sleep(_POLL_SECS)
    what = f"The process {process} that used {path} ended" if process else f"No crawl uses {path}"
    say(f"{what}{_pending(queue_figures(path))}")


def _holder(lock: Path) -> int | None:
    """Return the id of the process that holds a lock; None if none does."""
    found = holders(lock)
    if found is None or 0 in found:
        raise StorageError(
            f"the process that uses {lock.parent} cannot be found from here (it may run in another "
            "container, or this system has no /proc/locks); end it by Ctrl-C, or send it SIGINT"
        )
    return found[0] if found else None
