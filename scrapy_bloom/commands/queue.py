"""Show the queue of a crawl, or change it: pending, failed and dead requests.

The queue is that of CrashSafeScheduler, and a crawl may use it meanwhile. If
one uses the JOBDIR, it applies a change within a second. You are asked to
confirm every change. With --failed or --dead, --requeue and --drop concern
only these requests, otherwise both.

Examples:
  scrapy bloom queue jobs/news
  scrapy bloom queue redis://localhost:6379/0#shop:bloom --next 3 --json
  scrapy bloom queue jobs/news --failed --dead
  scrapy bloom queue jobs/news --failed --requeue --yes
  scrapy bloom queue redis://localhost:6379/0#shop:bloom --drop-host ads.test -y
"""

import argparse
from dataclasses import dataclass
from itertools import islice

from scrapy.exceptions import UsageError
from scrapy.settings import Settings

from scrapy_bloom.commands.shared.arguments import add_json, add_place, add_yes
from scrapy_bloom.commands.shared.figures import (
    ANY_HOST,
    DIED,
    HostFigures,
    failure_text,
    most_pending,
    read_queue,
    reason_of,
    tries,
)
from scrapy_bloom.commands.shared.opening import opened_place
from scrapy_bloom.commands.shared.output import Columns, confirm, print_json, print_table, say
from scrapy_bloom.commands.shared.place import Place
from scrapy_bloom.exceptions import BloomError
from scrapy_bloom.queues.serialized import line_of, round_robin, url_of
from scrapy_bloom.queues.store import Row, State
from scrapy_bloom.text import counted


@dataclass(frozen=True)
class _Request:
    url: str
    method: str
    priority: int

    @classmethod
    def of(cls, row: Row, data: bytes) -> "_Request":
        return cls(url_of(data), line_of(data)[0], row.priority)


_HOSTS: Columns[HostFigures] = (
    ("host:", lambda most: most.host),
    ("pending", lambda most: f"{most.pending:,}"),
)
_REQUESTS: Columns[_Request] = (
    ("priority", lambda request: str(request.priority)),
    ("method:", lambda request: request.method),
    ("request:", lambda request: request.url),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_place(parser, is_optional=True)
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
    add_yes(parser)
    add_json(parser)


def run(options: argparse.Namespace, settings: Settings) -> None:
    states = [state for state in (State.FAILED, State.DEAD) if getattr(options, state.value)]
    changes = options.requeue or options.drop or options.drop_host is not None
    if changes and options.json:
        raise UsageError("--requeue, --drop and --drop-host print no figures; leave --json out")
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
            _show(place, options)


def _change(place: Place, states: list[State], options: argparse.Namespace) -> None:
    """Change requests once the user agrees; fewer than shown if a crawl takes some meanwhile."""
    queue, slot, host = place.queue(), None, options.drop_host
    if host is None:
        states, counts = states or [State.FAILED, State.DEAD], queue.counts()
        number = sum(counts[state] for state in states)
        kind, host = " and ".join(state.value for state in states), place.name
    else:
        states, kind, hosts = [State.PENDING], "pending", queue.slots()
        slot = "" if host == ANY_HOST else host
        if not (number := hosts.get(slot, 0)):
            known = ", ".join(most.host for most in most_pending(hosts))
            raise BloomError(
                f"{place.name} has no pending requests of {host}; hosts that have "
                f"the most pending requests: {known or 'none'}"
            )

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
        say(
            f"The change of {text(number)} was handed over to the crawl of {place.name}: it "
            "applies it within a second, or when it is resumed"
        )
    else:
        say(f"{text(sum(filter(None, moved)))} {fate}")


def _list(place: Place, states: list[State], *, as_json: bool) -> None:
    """Print the requests of some states, and why they are in them."""
    queue = place.queue()
    if as_json:
        rows = [_failure(row) for state in states for row in queue.requests(state)]
        print_json({"location": place.name, "requests": rows})
        return
    for state in states:
        number = queue.counts()[state]
        if state is State.WAITING and not number:
            continue
        say(f"{counted(number, f'{state.value} request')} of {place.name}")
        for row in queue.requests(state):
            say(f"  {url_of(row.first_data)}: {failure_text(row)}")


def _failure(row: Row) -> dict[str, object]:
    return {
        "state": row.state.value,
        **vars(_Request.of(row, row.first_data)),
        "reason": reason_of(row) or DIED,
        "tries": tries(row),
        "deaths": row.deaths,
    }


def _show(place: Place, options: argparse.Namespace) -> None:
    """Print how many requests a queue has, by host, and the next ones."""
    queue, figures = place.queue(), read_queue(place)
    hosts = queue.slots()
    first = round_robin(
        hosts,
        options.next,
        lambda slot, number: list(islice(queue.requests(State.PENDING, slot), number)),
    )
    most, rows = most_pending(hosts), [_Request.of(row, row.data) for row in first]
    if options.json:
        counts = vars(figures) | {"hosts": len(hosts), "most_pending": most, "next": rows}
        print_json({"location": place.name, **counts})
        return
    assert figures is not None
    say(f"Queue of {place.name}: {figures.text()}")
    if not hosts:
        return
    say("")
    print_table(_HOSTS, most)
    if others := len(hosts) - len(most):
        number = sum(hosts.values()) - sum(host.pending for host in most)
        say(f"{counted(others, 'further host')}: {number:,} pending")
    say("")
    print_table(_REQUESTS, rows)
