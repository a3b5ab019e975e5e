"""Show the queue of a crawl: pending requests by host, the next requests, and dead letters.

PATH is a JOBDIR of CrashSafeScheduler; in Redis, workers share the queue. The crawl may run
meanwhile, but no crawl may use a JOBDIR that --requeue, --drop or --drop-host change. These
options ask first. Dead letters are not crawled any more, because each killed several processes.

Examples:
  scrapy bloom queue jobs/news
  scrapy bloom queue redis://localhost:6379/0#shop:bloom --next 3 --json
  scrapy bloom queue jobs/news --dead
  scrapy bloom queue jobs/news --requeue --yes
  scrapy bloom queue redis://localhost:6379/0#shop:bloom --drop-host ads.example
"""

import argparse
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from scrapy.exceptions import UsageError
from scrapy.settings import Settings

from scrapy_bloom.commands.shared.arguments import add_json, add_place, add_yes, requests
from scrapy_bloom.commands.shared.figures import (
    HOST_COLUMNS,
    Figures,
    dead_letters,
    most_pending,
    pending_by_host,
    queue_figures,
    queue_texts,
)
from scrapy_bloom.commands.shared.output import confirm, print_json, print_table, say
from scrapy_bloom.commands.shared.project import Place, job_database, opened_place, place_name
from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.job import jobdir
from scrapy_bloom.queues.batch import plain, url_of
from scrapy_bloom.queues.job_state import drop_dead, drop_slot, read_first, requeue_dead
from scrapy_bloom.queues.shared_state import drop_dead as drop_dead_letters
from scrapy_bloom.queues.shared_state import drop_host, read_next, requeue
from scrapy_bloom.redis.stored import RedisPlace
from scrapy_bloom.text import counted

_COUNTS = ("pending", "in_flight", "dead", "set_aside", "handed_over", "done")
_REASON = "was in flight in four processes that died, the last time alone"

_REQUEST_COLUMNS = (
    ("priority", "priority", str),
    ("depth", "depth", lambda depth: "-" if depth is None else str(depth)),
    ("callback:", "callback", lambda name: name or "parse"),
    ("request:", "url", str),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the subcommand."""
    add_place(parser, is_optional=True)
    parser.add_argument(
        "--next", type=requests, default=10, metavar="N", help="how many requests to show (10)"
    )
    parser.add_argument("--dead", action="store_true", help="show the dead letters")
    parser.add_argument(
        "--requeue", action="store_true", help="have the dead letters crawled again"
    )
    parser.add_argument("--drop", action="store_true", help="remove the dead letters")
    parser.add_argument("--drop-host", metavar="HOST", help="remove the pending requests of a host")
    add_yes(parser)
    add_json(parser)


def run(options: argparse.Namespace, settings: Settings) -> None:
    """Show a queue, or change it."""
    changes = [options.requeue, options.drop, options.drop_host is not None]
    if any(changes) and (options.dead or options.json or sum(changes) > 1):
        raise UsageError(
            "give one of --requeue, --drop and --drop-host; they show nothing: leave --dead and "
            "--json out"
        )
    with opened_place(options, settings) as place:
        if isinstance(place, Path) and (database := job_database(place)):
            place = database.parent  # noqa: PLW2901 - it was the path of a filter, perhaps
        if (queue := queue_figures(place)) is None:
            if isinstance(place, Path):
                raise StorageError(f"{place} holds no queue of CrashSafeScheduler; give its JOBDIR")
            raise StorageError(f"{place.server.address} has no queue {place.key!r}")
        if any(changes):
            _change(place, queue, options)
        elif options.dead:
            _show_dead(place, as_json=options.json)
        else:
            _show(place, queue, options)


def _change(place: Place, queue: Figures, options: argparse.Namespace) -> None:
    """Change requests once the user agrees; fewer than shown if workers take some meanwhile."""
    if options.drop_host is not None:
        number = pending_by_host(place).get(options.drop_host, 0)
        what, whats = (f"pending {each} of {options.drop_host}" for each in ("request", "requests"))
    else:
        number = len(queue["dead"])
        what, whats = (f"dead {each} of {place_name(place)}" for each in ("letter", "letters"))
    if number:
        if options.requeue:
            question = f"Have {counted(number, what, whats)} crawled again?"
        else:
            question = (
                f"Drop {counted(number, what, whats)}? They are not crawled: the filter still "
                "reports them as duplicates."
            )
        confirm(question, options)
        if isinstance(place, Path):
            number = _change_in_job(place, options)
        else:
            number = _change_in_redis(place, options)
    fate = "will be crawled again" if options.requeue else "dropped"
    say(f"{counted(number, what, whats)} {fate}")


def _change_in_job(job_dir: Path, options: argparse.Namespace) -> int:
    database = job_dir / jobdir.DATABASE
    with ExitStack() as stack:
        stack.callback(jobdir.lock_job(job_dir.absolute()).release)
        if options.drop_host is not None:
            return drop_slot(database, options.drop_host)
        return requeue_dead(database) if options.requeue else drop_dead(database)


def _change_in_redis(place: RedisPlace, options: argparse.Namespace) -> int:
    server, key = place.server, place.key
    if options.drop_host is not None:
        return drop_host(server, key, options.drop_host)
    if options.drop:
        return drop_dead_letters(server, key)
    return requeue(server, key, "dead")


def _show(place: Place, queue: Figures, options: argparse.Namespace) -> None:
    """Print how many requests a queue has, by host, and the next ones."""
    hosts = pending_by_host(place)
    if isinstance(place, Path):
        first = read_first(place / jobdir.DATABASE, hosts, options.next)
    else:
        first = read_next(place.server, place.key, hosts, options.next)
    most, rows = most_pending(hosts), [_request(data) for data in first]
    if options.json:
        counts = {name: queue[name] for name in _COUNTS if queue[name] is not None}
        counts["dead"] = len(queue["dead"])
        shown = {"hosts": len(hosts), "most_pending": most, "next": rows}
        print_json({"location": place_name(place), **counts, **shown})
        return
    say(f"Queue of {place_name(place)}: {'; '.join(queue_texts(queue))}")
    if not hosts:
        return
    say("")
    print_table(HOST_COLUMNS, most)
    if others := len(hosts) - len(most):
        number = sum(hosts.values()) - sum(each["pending"] for each in most)
        say(f"{counted(others, 'further host')}: {number:,} pending")
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


def _show_dead(place: Place, *, as_json: bool) -> None:
    name = place_name(place)
    dead = dead_letters(place)
    if as_json:
        rows = [{**_request(data), "reason": _REASON} for data in dead]
        print_json({"location": name, "dead": rows})
        return
    say(f"{counted(len(dead), 'dead letter')} of {name}" + (f": each {_REASON}" if dead else ""))
    for data in dead:
        say(f"  {url_of(data)}")
