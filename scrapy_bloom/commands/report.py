"""Write an HTML page about a filter: its fill, its error rate, a forecast, and its queue.

A crawl may use the JOBDIR meanwhile: the command locks nothing and changes nothing. It reads the
whole filter. The page is one file that needs no other file and no network. The forecast is for the
BLOOM_* settings of the project, or else for those with which the filter was made.

Examples:
  scrapy bloom report jobs/shop -o shop.html
  scrapy bloom report jobs/shop -o s.html --overwrite -s BLOOM_ERROR_RATE=1e-6
  scrapy bloom report redis://localhost:6379/0#shop:bloom -o shared.html
"""

import argparse
import math
import os
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from importlib import resources
from itertools import accumulate, count, islice
from pathlib import Path
from typing import Any, TypeAlias

from scrapy.settings import Settings

from scrapy_bloom import text
from scrapy_bloom.commands.plan import SCRAPY_SET_BYTES
from scrapy_bloom.commands.shared.arguments import add_place
from scrapy_bloom.commands.shared.figures import (
    ANY_HOST,
    failure_text,
    filter_figures,
    most_pending,
    queue_figures,
    speed_text,
)
from scrapy_bloom.commands.shared.output import say
from scrapy_bloom.commands.shared.places import Figures, Reader, opened_place
from scrapy_bloom.commands.shared.project import Project, load_project, state_text
from scrapy_bloom.exceptions import BloomError
from scrapy_bloom.filters.sizing import classic_fill_ratio
from scrapy_bloom.generations.policy import Generation, Policy, combined_rate
from scrapy_bloom.job.disk import create, explained
from scrapy_bloom.queues.serialized import url_of
from scrapy_bloom.queues.store import State

_RARE = {State.SUSPECT, State.UNREADABLE}  # shown only if there are any
_MOST_LISTED = 20  # failed requests, and dead ones
_POINTS = 240  # of a curve
_LEFT, _TOP, _WIDTH, _HEIGHT = 62, 42, 350, 270  # of the axes of the chart
Point: TypeAlias = tuple[int, float]  # requests recorded, and the error rate then
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_TOLERANCE = 1.1  # the counted rate scatters around the rate asked for


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the subcommand."""
    add_place(parser, is_optional=True)
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        required=True,
        metavar="FILE",
        help="where to write the page",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the file if it exists")


def run(options: argparse.Namespace, settings: Settings) -> None:
    """Write the page."""
    output = options.output
    if not output.parent.is_dir() or (output.exists() and not output.is_file()):
        raise BloomError(f"{output} cannot be written: give a file in a directory that exists")
    if output.exists() and not options.overwrite:
        raise BloomError(f"{output} exists already; add --overwrite to replace it")
    template = _template()
    project = load_project(settings, options.spider, options.place.url)
    with (
        opened_place(options.place, project) as place,
        closing(place.filter()) as reader,
    ):
        figures = filter_figures(reader, scans=True)
        figures["queue"] = counts = queue_figures(place, measures=True)
        values = _values(figures, reader, _policy(project, reader))
        if counts:
            queue = place.queue()
            values["hosts"] = most_pending(queue.slots())
            values["kept"] = [
                row
                for state in (State.FAILED, State.WAITING, State.DEAD)
                for row in islice(queue.requests(state), _MOST_LISTED)
            ]
            states = [state for state in State if counts[state] or state not in _RARE]
            values["states"] = [*(state.value for state in states), "done"]
    page = template.render(values).encode("utf-8", "backslashreplace")  # as a path may need
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
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    functions = (classic_fill_ratio, failure_text, speed_text, url_of)
    environment.globals |= {each.__name__: each for each in functions}
    environment.globals |= {"ANY_HOST": ANY_HOST, "text": text}
    source = resources.files(__package__).joinpath("report.html.jinja").read_text("utf-8")
    return environment.from_string(source)


def _policy(project: Project, reader: Reader) -> Policy:
    """Return how the filter will grow: by the settings if there are any, else as it was made."""
    policy, live = project.bloom.policy, reader.generations
    known = project.crawler.settings
    return Policy(
        expected=policy.expected if "BLOOM_EXPECTED_REQUESTS" in known else live[0].capacity,
        error_rate=policy.error_rate if "BLOOM_ERROR_RATE" in known else reader.error_rate,
        window=policy.window,
    )


def _values(figures: Figures, reader: Reader, policy: Policy) -> dict[str, Any]:
    """Return the values of the template, without those of the queue."""
    recorded, room, limit = figures["recorded"], figures["capacity"], figures["error_rate_asked"]
    later = grown(reader.generations, policy, max(4 * room, recorded + recorded // 4))
    rate = combined_rate(each["scan"]["error_rate_now"] for each in figures["generations"])
    verdict = "Nothing is recorded yet, so there are no false positives."
    if recorded:
        verdict = f"With {recorded:,} of {text.counted(room, 'request')} recorded, "
        if rate >= 0.05:
            verdict += f"{text.share_text(rate)} of the new requests are mistaken for duplicates."
        else:
            verdict += f"{_one_in(rate, 'one new request in')} is mistaken for a duplicate."
    return {
        "title": f"Bloom filter{' of ' if figures['spider'] else ''}{figures['spider']}",
        "figures": figures,
        "state": state_text(figures["closed"], figures["in_use"]),
        "verdict": verdict,
        "is_bad": recorded and rate > _TOLERANCE * limit,
        "asked": _one_in(limit),
        "set_bytes": recorded * SCRAPY_SET_BYTES,
        "window": policy.window,
        "chart": _chart(course(later), recorded, limit),
        "now": time.time(),
    }


def _chart(course: Sequence[Point], now: int, asked: float) -> dict[str, Any]:
    """Return the places and the labels of the chart, in which rates are logarithmic."""
    total, last = course[-1]
    rate = max(rate for requests, rate in course if requests <= now)
    lowest = min(asked * 1e-3, max(rate / 30, asked * 1e-14))
    bottom, top = math.log10(lowest), math.log10(min(30 * max(asked, last), 2.0))

    def x(requests: float) -> float:
        return round(_LEFT + _WIDTH * requests / total, 1)

    def y(rate: float) -> float:
        share = (math.log10(max(rate, lowest)) - bottom) / (top - bottom)
        return round(_TOP + _HEIGHT * (1 - share), 1)

    def line(points: Sequence[Point]) -> str:
        return " ".join(f"{x(requests)},{y(rate)}" for requests, rate in points)

    powers = range(math.ceil(bottom), math.floor(top) + 1, math.ceil((top - bottom) / 7))
    step = next(
        factor * 10**power
        for power in count()
        for factor in (1, 2, 5)
        if total <= 5 * factor * 10**power
    )
    return {
        "x": x,
        "so_far": line([point for point in course if 0 < point[0] <= now]),
        "ahead": line([point for point in course if point[0] >= max(now, 1)]),
        "rates": [(y(10.0**each), "10" + str(each).translate(_RAISED)) for each in powers],
        "requests": [(x(each), text.in_short(each)) for each in range(0, total + 1, step)],
        "target": y(asked),
        "dot": y(rate) if rate >= lowest else None,
        "middle": 0.6 * total,
        "near": 0.36 * total,
    }


def grown(live: Sequence[Generation], policy: Policy, until: int) -> list[Generation]:
    """Return the generations of a filter once `until` requests are recorded in it.

    The result has copies of the live generations, with their future counts, and the new ones.
    """
    live = [replace(generation) for generation in live]
    missing = until - sum(generation.count for generation in live)
    while missing > 0:
        newest = live[-1]
        room = min(max(newest.capacity - newest.count, 0), missing)
        newest.count += room
        missing -= room
        if missing > 0:
            live.append(Generation.of(policy.next(live), newest.number + 1, newest.last_run))
    return live


def course(generations: Sequence[Generation]) -> list[Point]:
    """Return points of the curve along which a filter fills, one generation after the other.

    They go from 0 to all requests, and include the last request of each generation and the first
    request of the next one.
    """
    ends = list(accumulate(generation.count for generation in generations))
    total = ends[-1]
    # The rate rises by many powers of ten at first.
    at = {round(total * step / _POINTS) for step in range(_POINTS + 1)}
    at |= {round(total * 0.97**step) for step in range(_POINTS)}
    at |= {end + step for end in ends for step in (0, 1) if end + step <= total}
    return [(requests, _rate_after(generations, requests)) for requests in sorted(at)]


def _rate_after(generations: Sequence[Generation], requests: int) -> float:
    """Return the rate of a filter when it had `requests` requests."""
    rates = []
    for generation in generations:
        rates.append(replace(generation, count=min(requests, generation.count)).error_rate_now)
        requests -= generation.count
        if requests <= 0:
            break
    return combined_rate(rates)


def _one_in(rate: float, start: str = "one in") -> str:
    if rate < 1e-15:
        return f"fewer than {start} a quadrillion"
    return f"{start} {text.in_words(1 / rate, 2)}"
