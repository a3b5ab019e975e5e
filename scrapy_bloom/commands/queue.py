"""Show the queue of a crawl, or change it: pending, failed and dead requests.

The queue is that of CrashSafeScheduler, and a crawl may use it meanwhile. If one uses the JOBDIR, a
change is handed over to it, and it applies the change within a second.

--failed lists the requests that failed, and those that wait for a page to which they were
redirected: the next run tries them again. --dead lists those that failed in five runs, or killed
several processes: they are not tried again. --requeue has failed and dead requests crawled again
now, and --drop removes them: only the failed ones with --failed, only the dead ones with --dead,
otherwise both. You are asked to confirm every change.

Examples:
  scrapy bloom queue jobs/news
  scrapy bloom queue redis://localhost:6379/0#shop:bloom --next 3 --json
  scrapy bloom queue jobs/news --failed --dead
  scrapy bloom queue jobs/news --failed --requeue --yes
  scrapy bloom queue redis://localhost:6379/0#shop:bloom --drop-host ads.test -y
"""

import argparse
from itertools import islice
from typing import Any

from scrapy.exceptions import UsageError
from scrapy.settings import Settings

from scrapy_bloom.commands.shared.arguments import add_json, add_place, add_yes, requests
from scrapy_bloom.commands.shared.figures import (
    ANY_HOST,
    DIED,
    HOST_COLUMNS,
    failure_text,
    most_pending,
    queue_figures,
    queue_texts,
    reason_of,
    tries,
)
from scrapy_bloom.commands.shared.output import confirm, print_json, print_table, say
from scrapy_bloom.commands.shared.places import Place, opened_place
from scrapy_bloom.exceptions import BloomError
from scrapy_bloom.queues.serialized import line_of, round_robin, url_of
from scrapy_bloom.queues.store import Row, State
from scrapy_bloom.text import counted

_LISTED = (State.FAILED, State.DEAD)  # the states that options name

_REQUEST_COLUMNS = (
    ("priority", "priority", str),
    ("method:", "method", str),
    ("request:", "url", str),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the subcommand."""
    add_place(parser, is_optional=True)
    parser.add_argument(
        "--next", type=requests, default=10, metavar="N", help="how many requests to show (10)"
    )
    parser.add_argument("--failed", action="store_true", help="list the failed requests")
    parser.add_argument("--dead", action="store_true", help="list the dead requests")
    parser.add_argument(
        "--requeue", action="store_true", help="have failed and dead requests crawled again"
    )
    parser.add_argument("--drop", action="store_true", help="remove failed and dead requests")
    parser.add_argument("--drop-host", metavar="HOST", help="remove the pending requests of a host")
    add_yes(parser)
    add_json(parser)


def run(options: argparse.Namespace, settings: Settings) -> None:
    """Show a queue, or change it."""
    states = [state for state in _LISTED if getattr(options, state.value)]
    changes = [options.requeue, options.drop, options.drop_host is not None]
    if sum(changes) > 1:
        raise UsageError("give only one of --requeue, --drop and --drop-host")
    if any(changes) and options.json:
        raise UsageError("--requeue, --drop and --drop-host print no figures; leave --json out")
    if states and options.drop_host is not None:
        raise UsageError("--drop-host removes pending requests: leave --failed and --dead out")
    with opened_place(options.place, settings) as place:
        if any(changes):
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
        states, counts = states or list(_LISTED), queue.counts()
        number = sum(counts[state] for state in states)
        kind, host = " and ".join(state.value for state in states), place.name
    else:
        states, kind, slot = [State.PENDING], "pending", "" if host == ANY_HOST else host
        host = slot or ANY_HOST
        hosts = queue.slots()
        number = hosts.get(slot, 0)
        if not number:
            known = ", ".join(each["host"] or ANY_HOST for each in most_pending(hosts))
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


def _failure(row: Row) -> dict[str, Any]:
    return {
        "state": row.state.value,
        **_request(row, row.first_data),
        "reason": reason_of(row) or DIED,
        "tries": tries(row),
        "deaths": row.deaths,
    }


def _show(place: Place, options: argparse.Namespace) -> None:
    """Print how many requests a queue has, by host, and the next ones."""
    queue, figures = place.queue(), queue_figures(place)
    assert figures is not None
    hosts = queue.slots()
    first = round_robin(
        hosts,
        options.next,
        lambda slot, number: list(islice(queue.requests(State.PENDING, slot), number)),
    )
    most, rows = most_pending(hosts), [_request(row, row.data) for row in first]
    if options.json:
        names = [*(state.value for state in State), "handed_over", "done"]
        counts = {name: figures[name] for name in names}
        shown = {"hosts": len(hosts), "most_pending": most, "next": rows}
        print_json({"location": place.name, **counts, **shown})
        return
    say(f"Queue of {place.name}: {'; '.join(queue_texts(figures))}")
    if not hosts:
        return
    say("")
    print_table(HOST_COLUMNS, most)
    if others := len(hosts) - len(most):
        number = sum(hosts.values()) - sum(each["pending"] for each in most)
        say(f"{counted(others, 'further host')}: {number:,} pending")
    say("")
    print_table(_REQUEST_COLUMNS, rows)


def _request(row: Row, data: bytes) -> dict[str, Any]:
    method, _ = line_of(data)
    return {"url": url_of(data), "method": method, "priority": row.priority}
