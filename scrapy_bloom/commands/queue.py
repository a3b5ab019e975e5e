"""Show the queue of a crawl: pending requests by host, those that come next, and dead letters.

PATH is a JOBDIR of CrashSafeScheduler; in Redis, it is the queue that workers share. The crawl may
run meanwhile. Requests are read without running any code of the project, or that is in them.

With --dead, the dead letters are shown: requests that killed one process after the other, and are
not crawled any more. With --requeue, they are crawled once more, by the next run of the job or by
the workers. It asks before it does.

Examples:
  scrapy bloom queue jobs/news
  scrapy bloom queue redis://localhost:6379/0 --key shop:bloom --next 3 --json
  scrapy bloom queue jobs/news --dead
  scrapy bloom queue jobs/news --requeue --yes
"""

import argparse
from collections.abc import Mapping, Sequence
from contextlib import closing
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
from scrapy_bloom.queues.batch import plain, url_of
from scrapy_bloom.queues.sharded import store_of
from scrapy_bloom.queues.shared_state import read_hosts, read_members, read_next, read_state
from scrapy_bloom.queues.sqlite import (
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

SYNTAX = "PATH|REDIS-URL [--key NAME] [--spider NAME] [--next N] [--dead] [--requeue] [--yes]"
HELP = "show pending requests by host, the next ones, and dead letters"

_MOST_HOSTS = 10

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
    """Add the subcommand's own."""
    add_place(parser)
    parser.add_argument(
        "--next", type=requests, default=10, metavar="N", help="how many requests to show (10)"
    )
    parser.add_argument("--dead", action="store_true", help="show the dead letters")
    parser.add_argument(
        "--requeue", action="store_true", help="have the dead letters crawled again"
    )
    parser.add_argument("-y", "--yes", action="store_true", help="do not ask")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace, settings: Settings) -> None:
    """Show a queue, or change it."""
    if options.requeue and (options.dead or options.json):
        raise UsageError("--requeue shows nothing: leave --dead and --json out")
    if is_redis(options.place):
        filter_ = connect(options, load_project(settings, options.spider, options.place))
        with closing(filter_.server):
            _run_in_redis(filter_, options)
    else:
        check_filter_name(options, options.place)
        _run_in_job(Path(options.place), options)


def _run_in_job(job_dir: Path, options: argparse.Namespace) -> None:
    database = job_dir / jobdir.DATABASE
    if not jobdir.is_database(database):
        raise StorageError(f"{job_dir} holds no queue of CrashSafeScheduler; give its JOBDIR")
    if options.requeue:
        _requeue_in_job(job_dir, database, yes=options.yes)
        return
    dead = read_dead(database)
    if options.dead:
        _show_dead(str(job_dir), dead, as_json=options.json)
        return
    pending, in_flight = read_counts(database)
    slots = read_slots(database)
    figures = {"pending": pending, "in_flight": in_flight, "dead": len(dead)}
    _show(str(job_dir), figures, slots, read_first(database, slots, options.next), options)


def _run_in_redis(filter_: SharedFilter, options: argparse.Namespace) -> None:
    server, key = filter_.server, filter_.key
    name = f"{key} in {server.address}"
    state = read_state(server, key)
    if state is None:
        raise StorageError(f"{server.address} has no queue {key!r}")
    if options.requeue:
        if number := state.dead:
            _confirm_requeue(number, name, yes=options.yes)
            shards = [unjoined(server, each) for each in shard_keys(server, key)]
            for each in shards:
                each.id = read_any_filter(each).id
            number = store_of(shards, state.crawl, by_slot=True, lease_secs=0).requeue("dead")
        _say_requeued(number, name)
        return
    if options.dead:
        dead = [each.data for each in read_members(server, key, "dead")]
        _show_dead(name, dead, as_json=options.json)
        return
    figures = {
        "pending": state.pending + state.suspects,
        "in_flight": state.leased,
        "dead": state.dead,
        "set_aside": state.aside,
        "done": state.done,
    }
    slots = read_hosts(server, key)
    _show(name, figures, slots, read_next(server, key, slots, options.next), options)


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
        print_json({"location": name, "dead": [_request(data) for data in dead]})
        return
    say(
        f"{counted(len(dead), 'dead letter')} of {name}"
        + (": each was in flight in four processes that died, the last time alone" if dead else "")
    )
    for data in dead:
        say(f"  {url_of(data)}")


def _requeue_in_job(job_dir: Path, database: Path, *, yes: bool) -> None:
    lock = lock_job(job_dir.absolute())
    try:
        if number := len(read_dead(database)):
            _confirm_requeue(number, str(job_dir), yes=yes)
            requeue_dead(database)
    finally:
        lock.release()
    _say_requeued(number, str(job_dir))


def _confirm_requeue(number: int, name: str, *, yes: bool) -> None:
    question = f"Have {counted(number, 'dead letter')} of {name} crawled again?"
    confirm(question, yes=yes, done="changed", do="do it")


def _say_requeued(number: int, name: str) -> None:
    say(f"{counted(number, 'dead letter')} of {name} will be crawled again")
