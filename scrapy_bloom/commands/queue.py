"""Show the queue of a crawl: pending requests by host, those that come next, and dead letters.

PATH is a JOBDIR of CrashSafeScheduler; in Redis, it is the queue that workers share. The crawl may
run meanwhile. Requests are read without running any code of the project, or that is in them.

With --dead, the dead letters are shown: requests that killed one process after the other, and are
not crawled any more. With --requeue, they are crawled once more, by the next run of the job or by
the workers; --drop removes them. --drop-host removes the pending requests of a host. These ask
first; no crawl may use a job meanwhile, workers may use a shared queue.

Examples:
  scrapy bloom queue jobs/news
  scrapy bloom queue redis://localhost:6379/0 --key shop:bloom --next 3 --json
  scrapy bloom queue jobs/news --dead
  scrapy bloom queue jobs/news --requeue --yes
  scrapy bloom queue redis://localhost:6379/0 --key shop:bloom --drop-host ads.example --yes
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from scrapy.exceptions import UsageError
from scrapy.settings import Settings

from scrapy_bloom.commands.shared.arguments import add_place, check_filter_name, is_redis, requests
from scrapy_bloom.commands.shared.output import confirm, print_json, print_table, say
from scrapy_bloom.commands.shared.project import connect, load_project
from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.job import paths as jobdir
from scrapy_bloom.job.locks import lock_job
from scrapy_bloom.queues.added import count_added
from scrapy_bloom.queues.batch import plain, url_of
from scrapy_bloom.queues.sharded import store_of
from scrapy_bloom.queues.shared_state import drop_dead as drop_dead_letters
from scrapy_bloom.queues.shared_state import (
    drop_host,
    read_hosts,
    read_next,
    read_requests,
    read_state,
)
from scrapy_bloom.queues.sqlite import (
    drop_dead,
    drop_slot,
    read_counts,
    read_dead,
    read_first,
    read_slots,
    requeue_dead,
)
from scrapy_bloom.redis.filter import SharedFilter
from scrapy_bloom.redis.reader import read_any_filter, unjoined
from scrapy_bloom.redis.shards import shard_keys
from scrapy_bloom.text import counted

SYNTAX = "PATH|REDIS-URL [--key NAME] [--spider NAME] [--next N] [--dead] ..."
HELP = "show pending requests by host, the next ones, and dead letters"

_MOST_HOSTS = 10
_REASON = "was in flight in four processes that died, the last time alone"

_HOST_COLUMNS = (
    ("host:", "host", lambda host: host or "(any)"),
    ("pending", "pending", lambda number: f"{number:,}"),
)
_REQUEST_COLUMNS = (
    ("priority", "priority", str),
    ("depth", "depth", lambda depth: "-" if depth is None else str(depth)),
    ("callback:", "callback", lambda name: name or "parse"),
    ("request:", "url", str),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the subcommand."""
    add_place(parser)
    parser.add_argument(
        "--next", type=requests, default=10, metavar="N", help="how many requests to show (10)"
    )
    parser.add_argument("--dead", action="store_true", help="show the dead letters")
    parser.add_argument(
        "--requeue", action="store_true", help="have the dead letters crawled again"
    )
    parser.add_argument("--drop", action="store_true", help="remove the dead letters")
    parser.add_argument("--drop-host", metavar="HOST", help="remove the pending requests of a host")
    parser.add_argument("-y", "--yes", action="store_true", help="do not ask")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace, settings: Settings) -> None:
    """Show a queue, or change it."""
    changes = [options.requeue, options.drop, options.drop_host is not None]
    if any(changes) and (options.dead or options.json or sum(changes) > 1):
        raise UsageError(
            "give one of --requeue, --drop and --drop-host; they show nothing: leave --dead and "
            "--json out"
        )
    if is_redis(options.place):
        filter_ = connect(options, load_project(settings, options.spider, options.place))
        with closing(filter_.server):
            _run_in_redis(filter_, options)
    else:
        check_filter_name(options, options.place)
        _run_in_job(Path(options.place), options)


def _run_in_job(job_dir: Path, options: argparse.Namespace) -> None:
    database, name = job_dir / jobdir.DATABASE, str(job_dir)
    if not jobdir.is_database(database):
        raise StorageError(f"{job_dir} holds no queue of CrashSafeScheduler; give its JOBDIR")
    if options.requeue or options.drop or options.drop_host is not None:
        lock = lock_job(job_dir.absolute())
        try:
            if options.drop_host is not None:
                number = read_slots(database).get(options.drop_host, 0)
                drop = partial(drop_slot, database, options.drop_host)
            else:
                number = len(read_dead(database))
                drop = partial(drop_dead if options.drop else requeue_dead, database)
            _change(options, name, number, drop)
        finally:
            lock.release()
        return
    dead = read_dead(database)
    if options.dead:
        _show_dead(name, dead, as_json=options.json)
        return
    pending, in_flight = read_counts(database)
    slots = read_slots(database)
    figures = {"pending": pending, "in_flight": in_flight, "dead": len(dead)}
    if added := count_added(job_dir):
        figures["handed_over"] = added
    _show(name, figures, slots, read_first(database, slots, options.next), options)


def _run_in_redis(filter_: SharedFilter, options: argparse.Namespace) -> None:
    server, key = filter_.server, filter_.key
    name = f"{key} in {server.address}"
    state = read_state(server, key)
    if state is None:
        raise StorageError(f"{server.address} has no queue {key!r}")
    if options.drop_host is not None:
        number = read_hosts(server, key).get(options.drop_host, 0)
        _change(options, name, number, partial(drop_host, server, key, options.drop_host))
    elif options.drop:
        _change(options, name, state.dead, partial(drop_dead_letters, server, key))
    elif options.requeue:
        _change(options, name, state.dead, partial(_requeue_in_redis, filter_, state.crawl))
    elif options.dead:
        dead = [each.data for each in read_requests(server, key, "dead")]
        _show_dead(name, dead, as_json=options.json)
    else:
        figures = {
            "pending": state.pending + state.suspects,
            "in_flight": state.leased,
            "dead": state.dead,
            "set_aside": state.aside,
            "done": state.done,
        }
        slots = read_hosts(server, key)
        _show(name, figures, slots, read_next(server, key, slots, options.next), options)


def _requeue_in_redis(filter_: SharedFilter, spider: str) -> int:
    shards = [unjoined(filter_.server, key) for key in shard_keys(filter_.server, filter_.key)]
    for each in shards:
        each.id = read_any_filter(each).id
    return store_of(shards, spider, by_slot=True, lease_secs=0).requeue("dead")


def _change(options: argparse.Namespace, name: str, number: int, change: Callable[[], int]) -> None:
    """Change so many requests, or fewer if workers take some meanwhile, once the user agrees."""
    if options.drop_host is not None:
        what = f"pending request of {options.drop_host}"
        whats = f"pending requests of {options.drop_host}"
    else:
        what, whats = f"dead letter of {name}", f"dead letters of {name}"
    if number:
        if options.requeue:
            question = f"Have {counted(number, what, whats)} crawled again?"
        else:
            question = (
                f"Drop {counted(number, what, whats)}? They are not crawled: the filter still "
                "reports them as duplicates."
            )
        confirm(question, yes=options.yes, done="changed", do="do it")
        number = change()
    fate = "will be crawled again" if options.requeue else "dropped"
    say(f"{counted(number, what, whats)} {fate}")


def _show(
    name: str,
    figures: Mapping[str, int],
    slots: Mapping[str, int],
    first: Sequence[bytes],
    options: argparse.Namespace,
) -> None:
    """Print how many requests a queue has, by host, and the next ones."""
    most = sorted(slots, key=lambda slot: -slots[slot])
    hosts = [{"host": slot, "pending": slots[slot]} for slot in most[:_MOST_HOSTS]]
    rows = [_request(data) for data in first]
    if options.json:
        shown = {"hosts": len(slots), "most_pending": hosts, "next": rows}
        print_json({"location": name, **figures, **shown})
        return
    texts = [f"{number:,} {what.replace('_', ' ')}" for what, number in figures.items()]
    say(f"Queue of {name}: {', '.join(texts)}")
    if not hosts:
        return
    say("")
    print_table(_HOST_COLUMNS, hosts)
    if others := most[_MOST_HOSTS:]:
        number = sum(slots[slot] for slot in others)
        say(f"{counted(len(others), 'further host')}: {number:,} pending")
    say("")
    print_table(_REQUEST_COLUMNS, rows)


def _request(data: bytes) -> dict[str, Any]:
    found = plain(data) or {}
    meta = found.get("meta")
    return {
        "url": url_of(data),
        "method": found.get("method"),
        "priority": found.get("priority"),
        "depth": meta.get("depth") if isinstance(meta, dict) else None,
        "callback": found.get("callback"),
    }


def _show_dead(name: str, dead: Sequence[bytes], *, as_json: bool) -> None:
    if as_json:
        rows = [{**_request(data), "reason": _REASON} for data in dead]
        print_json({"location": name, "dead": rows})
        return
    say(f"{counted(len(dead), 'dead letter')} of {name}" + (f": each {_REASON}" if dead else ""))
    for data in dead:
        say(f"  {url_of(data)}")
