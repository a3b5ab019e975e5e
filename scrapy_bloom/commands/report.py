"""Write an HTML page about a filter: its fill, its error rate, and its queue.

A crawl may use the filter meanwhile. The page is one file that needs no other
file and no network.

Examples:
  scrapy bloom report jobs/shop -o shop.html
  scrapy bloom report redis://localhost:6379/0#shop:bloom -o shared.html
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib import resources
from itertools import islice
from pathlib import Path
from typing import Any

from scrapy.settings import Settings

from scrapy_bloom import text
from scrapy_bloom.commands.plan import SCRAPY_SET_BYTES
from scrapy_bloom.commands.shared import figures
from scrapy_bloom.commands.shared.cli import add_shared, say
from scrapy_bloom.commands.shared.places import Place, opened_place
from scrapy_bloom.exceptions import BloomError
from scrapy_bloom.filters.sizing import classic_fill_ratio
from scrapy_bloom.generations.policy import Generation, combined_rate
from scrapy_bloom.job.disk import create, explained
from scrapy_bloom.queues.store import State

_POINTS = 60  # of the curve of a generation


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_shared(parser, "[place]", "--spider")
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
        page = template.render(_values(place)).encode()
    with explained(output), create(output) as file:  # which follows no link
        file.write(page)
    say(f"{output}: {text.size_text(len(page))}")


def _template() -> Any:
    """Return the template of the page; raises BloomError if Jinja2 is missing."""
    try:
        from jinja2 import Environment, StrictUndefined  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise BloomError(
            f"the page needs Jinja2, which cannot be imported ({error}): pip install 'jinja2>=3.1'"
        ) from None
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        # Of texts, not of the template's own markup.
        finalize=lambda value: text.escaped(value) if type(value) is str else value,
    )
    functions = (classic_fill_ratio, combined_rate, figures.state_text)
    environment.globals |= {function.__name__: function for function in functions}
    environment.globals |= {"text": text, "SCRAPY_SET_BYTES": SCRAPY_SET_BYTES}
    source = resources.files(__package__).joinpath("report.html.jinja").read_text("utf-8")
    return environment.from_string(source)


def _values(place: Place) -> dict[str, Any]:
    """Return the values of the template."""
    reader = place.reader()
    values = {
        "figures": figures.read_filter(reader, scans=True),
        "course": _course(reader.generations),
        "time": time.time(),
        "states": {},
    }
    if counts := figures.read_queue(place):
        queue = place.queue()
        values["states"] = {**figures.counts_by_state(counts), "done": counts["done"]}
        values["runs"] = counts["runs"]
        values["hosts"] = figures.most_pending(queue.slots())
        values["failures"] = [
            figures.failure(row)
            for state in (State.FAILED, State.WAITING, State.DEAD)
            for row in islice(queue.requests(state), 20)
        ]
    return values


def _course(live: Sequence[Generation]) -> list[tuple[int, float]]:
    """Return error rates, with the numbers of requests, until the last generation is full."""
    points, recorded, rates = [], 0, list[float]()
    for generation in live:
        is_last = generation is live[-1]
        full = max(generation.count, generation.capacity) if is_last else generation.count
        for step in range(_POINTS + 1):
            filling = replace(generation, count=round(full * step / _POINTS))
            rate = combined_rate([*rates, filling.error_rate_now])
            points.append((recorded + filling.count, rate))
        recorded += full
        rates.append(filling.error_rate_now)
    return points
