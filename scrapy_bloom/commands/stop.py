"""End the workers of a crawl, as Ctrl-C does, and wait until they have ended.

For a queue that workers share in Redis, all workers that run now are asked to end, on whatever
machine they are: each finishes the requests that it downloads, and leaves the queue. Workers that
start later are not asked. For a JOBDIR, the process of this machine that uses it is interrupted.

The pending requests stay in the queue: start the crawl with the same command as ever to resume it.

Examples:
  scrapy bloom stop jobs/shop
  scrapy bloom stop redis://localhost:6379/0 --key shop:bloom
  scrapy bloom stop redis://localhost:6379/0 --key shop:bloom --no-wait
"""

import argparse
import os
import signal
import time
from contextlib import closing
from pathlib import Path

from scrapy.settings import Settings

from scrapy_bloom.commands.shared.arguments import add_place, check_filter_name, is_redis
from scrapy_bloom.commands.shared.output import note, say, working
from scrapy_bloom.commands.shared.project import connect, job_database, load_project
from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.job.locks import LOCK_NAME, holders
from scrapy_bloom.queues.shared_state import QueueState, read_state, stop_workers
from scrapy_bloom.queues.sqlite import read_counts
from scrapy_bloom.redis.filter import SharedFilter
from scrapy_bloom.text import counted

SYNTAX = "PATH|REDIS-URL [--key NAME] [--spider NAME] [--no-wait]"
HELP = "end the workers of a crawl, which can be resumed"

_POLL_SECS = 0.25


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's own."""
    add_place(parser)
    parser.add_argument("--no-wait", action="store_true", help="do not wait until they have ended")


def run(options: argparse.Namespace, settings: Settings) -> None:
    """Ask the workers of a crawl to end."""
    if is_redis(options.place):
        filter_ = connect(options, load_project(settings, options.spider, options.place))
        with closing(filter_.server):
            _stop_workers(filter_, wait=not options.no_wait)
    else:
        check_filter_name(options, options.place)
        _stop_process(Path(options.place), wait=not options.no_wait)


def _stop_workers(filter_: SharedFilter, *, wait: bool) -> None:
    def state() -> QueueState:
        found = read_state(filter_.server, filter_.key)
        if found is None:
            raise StorageError(
                f"{filter_.server.address} has no queue {filter_.key!r}; no worker was stopped"
            )
        return found

    place = f"the queue {filter_.key} in {filter_.server.address}"
    now = state()
    names = [each.name for each in now.live]
    if not names:
        say(f"No worker uses {place}; {_left(now)}")
        return
    note(f"Asking {counted(len(names), 'worker')} to end: {', '.join(names)}")
    left = names
    with working("Waiting until they have ended"):
        while left:
            # Again each time: a worker that joined again did so under another id.
            stop_workers(filter_.server, filter_.key, left)
            if not wait:
                say(f"{counted(len(names), 'worker')} of {place} will end")
                return
            time.sleep(_POLL_SECS)
            now = state()
            left = [each.name for each in now.live if each.name in names]
    say(f"{counted(len(names), 'worker')} of {place} ended; {_left(now)}")


def _left(state: QueueState) -> str:
    number = state.pending + state.suspects + state.leased
    return f"{counted(number, 'request is', 'requests are')} pending"


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
    database = job_database(path)
    pending = sum(read_counts(database)) if database else None
    if pending is None:
        say(what)
    else:
        say(f"{what}; {counted(pending, 'request is', 'requests are')} pending")


def _holder(lock: Path) -> int | None:
    """Return the id of the process that holds a lock; None if none does."""
    found = holders(lock)
    if found is None or 0 in found:
        raise StorageError(
            f"the process that uses {lock.parent} cannot be found from here (it may run in another "
            "container, or this system has no /proc/locks); end it by Ctrl-C, or send it SIGINT"
        )
    return found[0] if found else None
