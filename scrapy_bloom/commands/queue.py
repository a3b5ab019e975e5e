"""Show the queue of a crawl, or change it: pending, failed and dead requests.

The queue is that of CrashSafeScheduler, and a crawl may use it meanwhile. If
one uses the JOBDIR, it applies a change within a second. You are asked to
confirm every change. With --failed or --dead, --requeue and --drop concern
only these requests, otherwise both.

Examples:
  scrapy bloom queue jobs/news
  scrapy bloom queue jobs/news --failed --dead
  scrapy bloom queue jobs/news --failed --requeue --yes
"""

import argparse
from itertools import islice

from scrapy.exceptions import UsageError
from scrapy.settings import Settings

from scrapy_bloom.commands.shared import figures
from scrapy_bloom.commands.shared.cli import (
    Columns,
    add_shared,
    confirm,
    print_json,
    print_table,
    say,
)
from scrapy_bloom.commands.shared.places import Place, opened_place
from scrapy_bloom.queues.serialized import round_robin
from scrapy_bloom.queues.store import State
from scrapy_bloom.text import counted, number_text

_HOSTS: Columns = (("host:", "host", str), ("pending", "pending", number_text))
_REQUESTS: Columns = (
    ("priority", "priority", str),
    ("method:", "method", str),
    ("request:", "url", str),
)
_FAILURES: Columns = (
    ("state:", "state", str),
    ("runs", "tries", str),
    ("request:", "url", str),
    ("reason:", "reason", str),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_shared(parser, "[place]", "--spider")
    parser.add_argument(
        "--next", type=int, default=10, metavar="N", help="how many requests to show (10)"
    )
    parser.add_argument(
        "--failed",
        action="store_true",
        help="list the requests that have failed, or wait for a page to which they were "
        "redirected: the next run tries them again",
    )
    parser.add_argument(
        "--dead",
        action="store_true",
        help="list the requests that failed in five runs, or killed several processes: they are "
        "not tried again",
    )
    change = parser.add_mutually_exclusive_group()
    change.add_argument(
        "--requeue", action="store_true", help="have failed and dead requests crawled again"
    )
    change.add_argument("--drop", action="store_true", help="remove failed and dead requests")
    change.add_argument("--drop-host", metavar="HOST", help="remove the pending requests of a host")
    add_shared(change, "--json")  # of what is not changed
    add_shared(parser, "--yes")


def run(options: argparse.Namespace, settings: Settings) -> None:
    states = [state for state in (State.FAILED, State.DEAD) if getattr(options, state.label)]
    changes = options.requeue or options.drop or options.drop_host is not None
    if states and options.drop_host is not None:
        raise UsageError("--drop-host removes pending requests: leave --failed and --dead out")
    with opened_place(options, settings) as (place, _):
        if changes:
            _change(place, states, options)
        elif states:
            if State.FAILED in states:
                states.insert(1, State.WAITING)
            _list(place, states, as_json=options.json)
        else:
            _print_next(place, options)


def _change(place: Place, states: list[State], options: argparse.Namespace) -> None:
    """Change requests once the user agrees; fewer than shown if a crawl takes some meanwhile."""
    queue, slot, host = place.queue(), None, options.drop_host
    if host is None:
        states, host = states or [State.FAILED, State.DEAD], place.name
        number = sum(queue.status().counts[state] for state in states)
    else:
        states, slot = [State.PENDING], "" if host == figures.ANY_HOST else host
        number = queue.slots().get(slot, 0)
    kind = " and ".join(state.label for state in states)

    def text(number: int) -> str:
        return counted(number, f"{kind} request of {host}", f"{kind} requests of {host}")

    if options.requeue:
        to, fate, question = State.PENDING, "will be crawled again", "Have {} crawled again?"
    else:
        to, fate = None, "dropped"
        question = "Drop {}? They are not crawled: the filter still reports them as duplicates."
    moved: list[int | None] = []
    if number:
        confirm(question.format(text(number)), options)
        moved = [queue.move(state, to, slot) for state in states]
    if None in moved:
        say(f"The change of {text(number)} was handed over to the crawl of {place.name}")
    else:
        say(f"{text(sum(filter(None, moved)))} {fate}")


def _list(place: Place, states: list[State], *, as_json: bool) -> None:
    """Print the requests of some states, and why they are in them."""
    queue = place.queue()
    requests = [figures.failure(row) for state in states for row in queue.requests(state)]
    if as_json:
        print_json({"location": place.name, "requests": requests})
    else:
        kinds = ", ".join(state.label for state in states)
        say(f"{counted(len(requests), 'request')} of {place.name} ({kinds})")
        print_table(_FAILURES, requests)


def _print_next(place: Place, options: argparse.Namespace) -> None:
    """Print the number of requests of each host in a queue, and the next requests."""
    queue, counts = place.queue(), figures.read_queue(place)
    hosts = queue.slots()
    rows = round_robin(
        hosts,
        options.next,
        lambda slot, number: list(islice(queue.requests(State.PENDING, slot), number)),
    )
    most = figures.most_pending(hosts)
    requests = [figures.request_figures(row.data, row.priority) for row in rows]
    assert counts is not None
    if options.json:
        counts |= {"hosts": len(hosts), "most_pending": most, "next": requests}
        print_json({"location": place.name, **counts})
        return
    say(f"Queue of {place.name}: {figures.queue_text(counts)}")
    if not hosts:
        return
    say("")
    print_table(_HOSTS, most)
    say("")
    print_table(_REQUESTS, requests)
