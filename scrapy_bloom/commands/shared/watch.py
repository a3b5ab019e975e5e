"""Show the progress of a crawl at intervals: `scrapy bloom info --watch`."""

import json
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from scrapy_bloom.commands.shared.figures import Figures, most_pending
from scrapy_bloom.commands.shared.output import is_lively, say, table
from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.redis.connection.server import next_attempt
from scrapy_bloom.text import counted, duration_text, escaped, masked, rate_text, share_text

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
    if as_json or not is_lively(sys.stdout):

        def show_line(figures: Figures) -> None:
            if as_json:
                sys.stdout.write(json.dumps(figures) + "\n")
            else:
                say(f"{time.strftime('%H:%M:%S')} {_line(figures)}")
            sys.stdout.flush()

        yield show_line
        return
    from rich.console import Console  # noqa: PLC0415 - only for people
    from rich.live import Live  # noqa: PLC0415

    console = Console(file=sys.stdout, markup=False, emoji=False, highlight=False)
    with Live(console=console, auto_refresh=False) as live:
        yield lambda figures: live.update(progress_table(figures), refresh=True)


def _line(figures: Figures) -> str:
    if "error" in figures:
        return f"no figures: {figures['error']}; trying again"
    return "; ".join([*_queue_texts(figures["queue"]), *_filter_texts(figures)])


def _queue_texts(queue: Figures | None) -> Iterator[str]:
    if queue is None:
        return
    if queue["workers"] is not None:
        alive = sum(each["is_alive"] for each in queue["workers"])
        yield counted(alive, "worker")
    rate, average = queue["done_per_second"], queue["done_per_second_average"]
    yield f"{_rate(rate)} pages/s ({_rate(average)} on average)"
    yield f"{queue['in_flight']:,} in flight"
    growth = queue["growth_per_second"]
    yield f"{queue['pending']:,} pending" + (f" ({growth:+,.1f}/s)" if growth is not None else "")
    yield f"{queue['done']:,} done"
    yield counted(len(queue["dead"]), "dead letter")
    if queue["ended_at"]:
        yield "the crawl has ended"
    elif queue["seconds_left"] is not None:
        yield f"about {_duration(queue['seconds_left'])} left"
    elif growth is not None and growth > 0:
        yield "time left unknown: the queue grows"


def _filter_texts(figures: Figures) -> Iterator[str]:
    if figures["recorded"] is not None:
        yield f"{figures['recorded']:,} recorded"
        yield f"fill {share_text(figures['fill_ratio'])}"
        yield f"false-positive rate {rate_text(figures['error_rate_now'])}"


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


_WORKER_COLUMNS = (
    ("worker:", "name", str),
    ("pages/s", "done_per_second", _rate),
    ("average", "done_per_second_average", _rate),
    ("in flight", "in_flight", "{:,}".format),
    ("heartbeat", "heartbeat", str),
)
HOST_COLUMNS = (
    ("host:", "host", lambda host: host or "(any)"),
    ("pending", "pending", "{:,}".format),
)


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
        _, *texts = _queue_texts({**queue, "workers": queue["workers"] or []})
        parts += [Text("; ".join(texts)), Text("")]
        workers = queue["workers"] or []
        name = "all workers" if workers else "the crawl"
        total = {**queue, "name": name, "heartbeat_secs": None, "is_alive": True}
        rows = [
            {**each, "heartbeat": _age(each["heartbeat_secs"]) if each["is_alive"] else "expired"}
            for each in (*workers, total)
        ]
        parts.append(table(_WORKER_COLUMNS, rows))
        if queue["hosts"]:
            parts += [Text(""), table(HOST_COLUMNS, queue["hosts"])]
    return Group(*parts)


def _age(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.0f} s ago"


def _duration(seconds: float) -> str:
    unit = next((unit for unit in (86_400, 3600, 60) if seconds >= unit), 1)
    return duration_text(max(1, round(seconds / unit)) * unit)
