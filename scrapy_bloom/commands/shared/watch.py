"""Show the progress of a crawl at intervals: `scrapy bloom info --watch`."""

import json
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from scrapy_bloom.commands.shared.figures import (
    HOST_COLUMNS,
    WORKER_COLUMNS,
    Figures,
    most_pending,
    queue_texts,
    worker_rows,
)
from scrapy_bloom.commands.shared.output import say, table
from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.redis.connection.server import next_attempt
from scrapy_bloom.text import escaped, masked, rate_text, share_text

_GROWTH_SECS = 60.0  # the time over which the growth of the queue is measured
_MOST_HOSTS = 10
_NOT_WATCHED = ("generations", "salt")  # figures that do not change, or are secret


class Rates:
    """Computes the rates of a queue from its figures at several moments."""

    def __init__(self) -> None:
        self._times: deque[tuple[float, int]] = deque()  # when, and how many requests were left
        # By worker ("": all workers): when it was first and last seen, and its requests done then.
        self._seen: dict[str, tuple[_Sample, _Sample]] = {}

    def add(self, queue: Figures) -> None:
        """Add the rates to the figures of a queue: None where there was no earlier look at it."""
        now = time.monotonic()
        seen = {}
        for name, figures in (
            ("", queue),
            *((each["name"], each) for each in queue["workers"] or ()),
        ):
            done = figures["done"]
            first, last = self._seen.get(name, ((now, done), (now, done)))
            if done < last[1]:  # the server lost something
                first = last = now, done
            figures["done_per_second"] = _slope(last, now, done)
            figures["done_per_second_average"] = _slope(first, now, done)
            seen[name] = first, (now, done)
        self._seen = seen  # without the workers that are gone
        left = queue["pending"] + queue["in_flight"]
        self._times.append((now, left))
        while now - self._times[0][0] > _GROWTH_SECS and len(self._times) > 2:
            self._times.popleft()
        growth = queue["growth_per_second"] = _slope(self._times[0], now, left)
        queue["seconds_left"] = left / -growth if growth and growth < 0 else None


_Sample = tuple[float, int]  # when, and a number of requests


def _slope(since: _Sample, now: float, number: int) -> float | None:
    begun, before = since
    return (number - before) / (now - begun) if now > begun else None


def watch(
    read: Callable[[], Figures],
    read_hosts: Callable[[], dict[str, int]],
    interval: float,
    *,
    as_json: bool,
) -> None:
    """Print the progress of a crawl until Ctrl-C: a table on a terminal, else a line each time.

    If the server does not answer, an error is shown and the next interval tries again.

    Raises:
        StorageError: the first attempt failed.
    """
    rates, is_first = Rates(), True
    hosts: dict[str, int] = {}
    hosts_due = 0.0
    with _shown(as_json=as_json) as show:
        while True:
            begun = time.monotonic()
            figures: Figures
            try:
                figures = read()
                if queue := figures["queue"]:
                    rates.add(queue)
                    if begun >= hosts_due:  # a broad crawl has very many hosts
                        hosts_begun = time.monotonic()
                        hosts = read_hosts()
                        hosts_due = next_attempt(hosts_begun)
                    queue["hosts"] = most_pending(hosts, _MOST_HOSTS)
                figures = {key: figures[key] for key in figures if key not in _NOT_WATCHED}
            except StorageError as error:
                if is_first:
                    raise
                figures = {"error": masked(str(error))}
            is_first = False
            show({"time": time.time(), **figures})
            time.sleep(max(0.0, begun + interval - time.monotonic()))


@contextmanager
def _shown(*, as_json: bool) -> Iterator[Callable[[Figures], None]]:
    from rich.console import Console  # noqa: PLC0415 - only if it is used
    from rich.live import Live  # noqa: PLC0415

    console = Console(file=sys.stdout, markup=False, emoji=False, highlight=False)
    if as_json or not console.is_interactive:

        def show_line(figures: Figures) -> None:
            if as_json:
                sys.stdout.write(json.dumps(figures) + "\n")
            else:
                say(f"{time.strftime('%H:%M:%S')} {_line(figures)}")
            sys.stdout.flush()

        yield show_line
        return
    with Live(console=console, auto_refresh=False) as live:
        yield lambda figures: live.update(progress_table(figures), refresh=True)


def _line(figures: Figures) -> str:
    if "error" in figures:
        return f"no figures: {figures['error']}; trying again"
    queue = figures["queue"]
    return "; ".join([*(queue_texts(queue) if queue else ()), *_filter_texts(figures)])


def _filter_texts(figures: Figures) -> Iterator[str]:
    if figures["recorded"] is not None:
        yield f"{figures['recorded']:,} recorded"
        yield f"fill {share_text(figures['fill_ratio'])}"
        yield f"false-positive rate {rate_text(figures['error_rate_now'])}"


def progress_table(figures: Figures) -> Any:
    """Return the progress of a crawl as a rich renderable."""
    from rich.console import Group  # noqa: PLC0415 - only for people
    from rich.text import Text  # noqa: PLC0415

    clock = time.strftime("%H:%M:%S", time.localtime(figures["time"]))
    if "error" in figures:
        return Text(f"{clock} {escaped(_line(figures))}", style="bold red")
    queue = figures["queue"]
    parts: list[Any] = [
        Text(f"{escaped(figures['location'])} at {clock}", style="bold"),
        Text("; ".join(_filter_texts(figures))),
    ]
    if queue:
        parts += [Text("; ".join(queue_texts(queue))), Text("")]
        workers = queue["workers"] or []
        name = "all workers" if workers else "the crawl"
        total = {**queue, "name": name, "heartbeat_secs": None, "is_alive": True}
        parts.append(table(WORKER_COLUMNS, worker_rows([*workers, total])))
        if queue["hosts"]:
            parts += [Text(""), table(HOST_COLUMNS, queue["hosts"])]
    return Group(*parts)
