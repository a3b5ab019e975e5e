"""Write an HTML page about a filter: its fill, its error rate, a forecast, and its queue.

PATH is a JOBDIR, or a directory with the files of a filter. A crawl may use the filter meanwhile:
the command locks nothing and changes nothing. It reads the whole filter. The page is one file that
needs no other file and no network. The forecast is for the BLOOM_* settings of the project, or else
for those with which the filter was made.

Examples:
  scrapy bloom report jobs/shop -o shop.html
  scrapy bloom report jobs/shop -o s.html --overwrite -s BLOOM_ERROR_RATE=1e-6
  scrapy bloom report redis://localhost:6379/0#shop:bloom -o shared.html
"""

import argparse
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import datetime, timezone
from html import escape
from importlib import resources
from itertools import accumulate, islice, starmap
from pathlib import Path
from string import Template

from scrapy.settings import Settings

from scrapy_bloom.commands.shared.arguments import add_place
from scrapy_bloom.commands.shared.figures import (
    ANY_HOST,
    failure_text,
    filter_figures,
    most_pending,
    queue_figures,
)
from scrapy_bloom.commands.shared.output import say
from scrapy_bloom.commands.shared.places import Figures, Place, Reader, opened_place
from scrapy_bloom.commands.shared.project import Project, load_project, state_text
from scrapy_bloom.exceptions import BloomError
from scrapy_bloom.filters.sizing import classic_fill_ratio
from scrapy_bloom.generations.policy import Generation, Policy, combined_rate, window_of
from scrapy_bloom.job.disk import create, explained
from scrapy_bloom.pictures import (
    SCRAPY_SET_BYTES,
    Point,
    error_chart,
    import_pyplot,
)
from scrapy_bloom.queues.serialized import url_of
from scrapy_bloom.queues.store import State
from scrapy_bloom.text import counted, duration_text, in_words, number_text, share_text, size_text

_RARE = {State.SUSPECT, State.UNREADABLE}  # shown only if there are any
_MOST_LISTED = 20  # failed requests, and dead ones
_POINTS = 240  # of a curve
_TOLERANCE = 1.1  # the counted rate scatters around the rate asked for
_WINDOW = "This filter has a time window: each generation expires one window after it is complete."


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
    _check_output(options.output, overwrite=options.overwrite)
    import_pyplot()  # reports a missing matplotlib before the work
    project = load_project(settings, options.spider, options.place.url)
    with (
        opened_place(options.place, project) as place,
        closing(place.filter(window=project.bloom.window_secs)) as reader,
    ):
        queue = queue_figures(place, measures=True)
        figures = {**filter_figures(reader, scans=True), "queue": queue}
        policy = _policy(project, reader)
        page = _page(figures, reader.generations, policy, _queue(place, queue) if queue else "")
    _write(options.output, page)
    say(f"{options.output}: {size_text(len(page.encode()))}")


def _policy(project: Project, reader: Reader) -> Policy:
    """Return how the filter will grow: by the settings if there are any, else as it was made."""
    policy, live = project.bloom.policy, reader.generations
    known = project.crawler.settings
    return Policy(
        expected=policy.expected if "BLOOM_EXPECTED_REQUESTS" in known else live[0].capacity,
        error_rate=policy.error_rate if "BLOOM_ERROR_RATE" in known else reader.error_rate,
        window=window_of(live),
    )


def _check_output(path: Path, *, overwrite: bool) -> None:
    """Check that a file may be written, before the work for it begins."""
    if path.exists() and not path.is_file():
        raise BloomError(f"{path} cannot be written: it is a directory or a device; give a file")
    if not path.parent.is_dir():
        raise BloomError(f"{path} cannot be written: the directory {path.parent} does not exist")
    if path.exists() and not overwrite:
        raise BloomError(f"{path} exists already; add --overwrite to replace it")


def _write(path: Path, text: str) -> None:
    """Write a file atomically."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with explained(path):
        try:
            with create(draft) as file:
                file.write(text.encode())
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)


def _page(figures: Figures, live: Sequence[Generation], policy: Policy, queue: str) -> str:
    """Return the page as HTML.

    Args:
        figures: of the filter, with its bits counted.
        live: its generations, oldest first.
        policy: how it will grow.
        queue: the section about its queue.
    """
    now, room = figures["recorded"], figures["capacity"]
    later = grown(live, policy, max(4 * room, now + now // 4))
    points = course(later)
    mood, verdict, advice = _verdict(figures)
    title = f"Bloom filter of {figures['spider']}" if figures["spider"] else "Bloom filter"
    template = resources.files(__package__).joinpath("report.html").read_text("utf-8")
    page = Template(template).substitute(
        title=escape(title),
        facts=_facts(figures),
        mood=mood,
        verdict=escape(verdict),
        advice=escape(advice),
        cards="\n".join(starmap(_card, _cards(figures))),
        queue=queue,
        generations=_table([_cells(each) for each in figures["generations"]]),
        window=escape(_WINDOW) if policy.window else "",
        error=error_chart(points, now, room, figures["error_rate_asked"]),
        forecast=escape(_forecast(policy)),
        made=escape(f"Made by scrapy bloom report, {_time(time.time())} UTC"),
    )
    return page.encode("utf-8", "backslashreplace").decode()  # a path may not be UTF-8


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
            live.append(
                Generation.of(
                    policy.next(live),
                    newest.number + 1,
                    newest.created_at,
                    open_until=newest.open_until,
                )
            )
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
    return [after(generations, requests) for requests in sorted(at)]


def after(generations: Sequence[Generation], requests: int) -> Point:
    """Return the rate of a filter when it had `requests` requests."""
    then: list[Generation] = []
    left = requests
    for generation in generations:
        if left <= 0 and then:
            break
        then.append(replace(generation, count=min(left, generation.count)))
        left -= generation.count
    return Point(
        requests,
        combined_rate(generation.error_rate_now for generation in then),
    )


def _facts(figures: Figures) -> str:
    window = figures["window_secs"]
    facts = {
        "Place": figures["location"],
        "Spider": figures["spider"] or "unknown",
        "Fingerprinter": figures["fingerprinter"] or "unknown",
        "Created": f"{_time(figures['generations'][0]['created'])} UTC",
        "Time window": duration_text(window) if window else "none",
        "State": state_text(figures["closed"], figures["in_use"]),
    }
    return "\n".join(f"<dt>{name}</dt><dd>{escape(value)}</dd>" for name, value in facts.items())


def _verdict(figures: Figures) -> tuple[str, str, str]:
    """Return the mood of the page ("good" or "bad"), its headline, and what to do."""
    rate = combined_rate(each["scan"]["error_rate_now"] for each in figures["generations"])
    limit, count = figures["error_rate_asked"], figures["recorded"]
    asked = f"Target: at most {_one_in(limit)}."
    if not count:
        return "good", "Nothing is recorded yet, so there are no false positives.", asked
    if rate >= 0.05:
        share = f"{share_text(rate)} of the new requests are mistaken for duplicates"
    else:
        share = f"{_one_in(rate, 'one new request in')} is mistaken for a duplicate"
    verdict = f"With {count:,} of {counted(figures['capacity'], 'request')} recorded, {share}."
    if rate <= _TOLERANCE * limit:
        return "good", verdict, asked
    advice = (
        f"{asked} If there is room for a new generation, the next run continues in it, and the "
        "rate rises no more; to lower it, start with a new filter."
    )
    return "bad", verdict, advice


def _cards(figures: Figures) -> Iterator[tuple[str, str, str]]:
    count, room, nbytes = figures["recorded"], figures["capacity"], figures["bytes"]
    yield "Recorded", f"{count:,}", f"of {room:,}: {share_text(count / room)}"
    drops = figures["expected_false_positives"]
    yield "Expected false positives", number_text(drops, 2), "pages lost so far"
    yield "Size", size_text(nbytes), f"Scrapy's set: {size_text(count * SCRAPY_SET_BYTES)}"


def _card(name: str, value: str, more: str) -> str:
    return (
        f'<div class="card panel"><span>{name}</span><b>{escape(value)}</b>'
        f"<span>{escape(more)}</span></div>"
    )


def _cells(figures: Figures) -> dict[str, str]:
    """Return a row of the table by its columns; one that ends with ":" is text."""
    end, fill = figures["open_until"], figures["scan"]["fill_ratio"]
    num_bits = 8 * figures["bytes"]
    when_full = classic_fill_ratio(num_bits, figures["hashes"], figures["capacity"])
    bar = (
        f'<span><span class="bar"><i style="width:{100 * fill:.2f}%"></i>'
        f'<u style="left:{100 * when_full:.2f}%"></u></span>'
        f'<span class="share">{share_text(fill)}</span></span>'
    )
    return {
        "Generation:": f"{figures['number']}<small>{figures['file'] or ''}</small>",
        "Created (UTC):": _time(figures["created"]),
        "Open until (UTC):": _time(end) if end else "-",
        "Recorded": f"{figures['recorded']:,}",
        "Capacity": f"{figures['capacity']:,}",
        "Size": size_text(figures["bytes"]),
        "Hashes": str(figures["hashes"]),
        "Fill:": bar,
        "Error rate": _rate(figures["scan"]["error_rate_now"]),
    }


def _queue(place: Place, figures: Figures) -> str:
    """Return the section about the queue: how many requests have which state, and some of them."""
    queue, rate = place.queue(), figures["done_per_second"]
    names = [state.value for state in State if figures[state] or state not in _RARE] + ["done"]
    values = {name.replace("_", " ").capitalize(): f"{figures[name]:,}" for name in names}
    values["Pages per second"] = "-" if rate is None else f"{rate:,.1f}"
    cards = "\n".join(_card(name, value, "") for name, value in values.items())
    hosts = [
        {"Host:": escape(each["host"] or ANY_HOST), "Pending": f"{each['pending']:,}"}
        for each in most_pending(queue.slots())
    ]
    kept = [
        {
            "Request:": escape(url_of(row.first_data)),
            "State:": state.value,
            "Reason:": escape(failure_text(row)),
        }
        for state in (State.FAILED, State.WAITING, State.DEAD)
        for row in islice(queue.requests(state), _MOST_LISTED)
    ]
    tables = "".join(_table(rows) for rows in (hosts, kept) if rows)
    return f'<section id="queue"><h2>Queue</h2><div class="cards">{cards}</div>{tables}</section>'


def _table(rows: Sequence[dict[str, str]]) -> str:
    head = "".join(f"<th{_kind(name)}>{name.strip(':')}</th>" for name in rows[0])
    return (
        f'<div class="table panel"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(map(_row, rows))}</tbody></table></div>"
    )


def _row(cells: dict[str, str]) -> str:
    row = [
        f'<td{_kind(name)} data-name="{name.strip(":")}">{cell}</td>'
        for name, cell in cells.items()
    ]
    return f"<tr>{''.join(row)}</tr>"


def _kind(name: str) -> str:
    return ' class="text"' if name.endswith(":") else ""


def _forecast(policy: Policy) -> str:
    text = (
        "The forecast: a full generation is followed by a larger one with a lower error rate of "
        "its own, so the sum levels off."
    )
    if policy.window:
        text += " It assumes that none of the generations expires meanwhile."
    return text


def _time(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, timezone.utc):%Y-%m-%d %H:%M}"


def _rate(value: float) -> str:
    return f"{value:.{3 if value > 0.01 else 2}g}".replace("e-0", "e-")


def _one_in(rate: float, start: str = "one in") -> str:
    if rate < 1e-15:
        return f"fewer than {start} a quadrillion"
    return f"{start} {in_words(1 / rate, 2)}"
