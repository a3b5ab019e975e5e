"""Write an HTML page about a filter: its fill, its error rate, and its queue.

A crawl may use the filter meanwhile. The page is one file that needs no other
file and no network.

Examples:
  scrapy bloom report jobs/shop -o shop.html
  scrapy bloom report jobs/shop -o s.html --overwrite
  scrapy bloom report redis://localhost:6379/0#shop:bloom -o shared.html
"""

import argparse
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib import resources
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, TypeAlias

from scrapy.settings import Settings

from scrapy_bloom import text
from scrapy_bloom.commands.plan import SCRAPY_SET_BYTES
from scrapy_bloom.commands.shared.arguments import add_place
from scrapy_bloom.commands.shared.figures import (
    FilterFigures,
    failure_text,
    most_pending,
    read_filter,
    read_queue,
)
from scrapy_bloom.commands.shared.opening import opened_place
from scrapy_bloom.commands.shared.output import say
from scrapy_bloom.exceptions import BloomError
from scrapy_bloom.filters.sizing import classic_fill_ratio
from scrapy_bloom.generations.policy import Generation, combined_rate
from scrapy_bloom.job.disk import create, explained
from scrapy_bloom.queues.serialized import url_of
from scrapy_bloom.queues.store import State

_MOST_LISTED = 20  # failed requests, and dead ones
_POINTS = 240  # of a curve
_LEFT, _TOP, _WIDTH, _HEIGHT = 62, 42, 350, 270  # of the axes of the chart
_TOLERANCE = 1.1  # the counted rate scatters around the rate asked for
_Point: TypeAlias = tuple[int, float]  # requests recorded, and the error rate then


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_place(parser, is_optional=True)
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FILE", help="where to write the page"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the file if it exists")


def run(options: argparse.Namespace, settings: Settings) -> None:
    output = options.output
    if not output.parent.is_dir() or (output.exists() and not output.is_file()):
        raise BloomError(f"{output} cannot be written: give a file in a directory that exists")
    if output.exists() and not options.overwrite:
        raise BloomError(f"{output} exists already; add --overwrite to replace it")
    template = _template()
    with opened_place(options, settings) as (place, _):
        reader = place.reader()
        values = _values(read_filter(reader, scans=True), reader.generations)
        if figures := read_queue(place):
            queue = place.queue()
            counts = {state.value: number for state, number in figures.counts.items()}
            values["states"] = {**counts, "done": figures.done}
            values["runs"] = figures.runs
            values["hosts"] = most_pending(queue.slots())
            values["kept"] = [
                row
                for state in (State.FAILED, State.WAITING, State.DEAD)
                for row in islice(queue.requests(state), _MOST_LISTED)
            ]
    page = template.render(values).encode()
    draft = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    with explained(output):
        try:
            with create(draft) as file:
                file.write(page)
            draft.replace(output)
        finally:
            draft.unlink(missing_ok=True)
    say(f"{output}: {text.size_text(len(page))}")


def _template() -> Any:
    """Return the template of the page; raises BloomError if Jinja2 is missing."""
    try:
        from jinja2 import Environment, StrictUndefined  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise BloomError(
            f"the page needs Jinja2, which cannot be imported ({error}): pip install 'jinja2>=3.1'"
        ) from None
    environment = Environment(autoescape=True, undefined=StrictUndefined, finalize=_escaped)
    functions = (classic_fill_ratio, failure_text, url_of)
    environment.globals |= {function.__name__: function for function in functions}
    environment.globals["text"] = text
    source = resources.files(__package__).joinpath("report.html.jinja").read_text("utf-8")
    return environment.from_string(source)


def _escaped(value: Any) -> Any:
    """Escape the control characters of a text, but not those of the template's own markup."""
    return text.escaped(value) if type(value) is str else value


def _values(figures: FilterFigures, live: Sequence[Generation]) -> dict[str, Any]:
    """Return the values of the template, without those of the queue."""
    rate = combined_rate(shown.counted_error_rate or 0.0 for shown in figures.generations)
    return {
        "title": f"Bloom filter{' of ' if figures.spider else ''}{figures.spider}",
        "figures": figures,
        "rate": rate,
        "is_bad": figures.recorded and rate > _TOLERANCE * figures.error_rate_asked,
        "set_bytes": figures.recorded * SCRAPY_SET_BYTES,
        "chart": _chart(_course(live), figures),
        "now": time.time(),
        "states": {},
    }


def _course(live: Sequence[Generation]) -> list[_Point]:
    """Return points of the curve along which a filter fills, until its last generation is full."""
    counts = [generation.count for generation in live[:-1]]
    counts.append(max(live[-1].count, live[-1].capacity))
    at = {round(sum(counts) * step / _POINTS) for step in range(_POINTS + 1)}
    at |= set(accumulate(counts))
    return [(requests, _rate_after(live, counts, requests)) for requests in sorted(at)]


def _rate_after(live: Sequence[Generation], counts: Sequence[int], requests: int) -> float:
    """Return the rate of a filter when it had `requests` requests."""
    rates = []
    for generation, number in zip(live, counts, strict=True):
        rates.append(replace(generation, count=min(requests, number)).error_rate_now)
        requests -= min(requests, number)
    return combined_rate(rates)


def _chart(course: Sequence[_Point], figures: FilterFigures) -> dict[str, Any]:
    """Return the places and the labels of the chart."""
    total, last = course[-1]
    now, highest = figures.recorded, max(figures.error_rate_asked, last)

    def x(requests: float) -> float:
        return round(_LEFT + _WIDTH * requests / total, 1)

    def y(rate: float) -> float:
        return round(_TOP + _HEIGHT * (1 - rate / (1.1 * highest)), 1)

    def line(points: Sequence[_Point]) -> str:
        return " ".join(f"{x(requests)},{y(rate)}" for requests, rate in points)

    rates, requests = ([end * part / 4 for part in range(5)] for end in (highest, total))
    return {
        "so_far": line([point for point in course if point[0] <= now]),
        "ahead": line([point for point in course if point[0] >= now]),
        "rates": [(y(rate), text.number_text(rate, 2)) for rate in rates],
        "requests": [(x(number), text.in_short(number)) for number in requests],
        "target": y(figures.error_rate_asked),
        "now": x(now),
        "dot": y(max(rate for number, rate in course if number <= now)),
    }
