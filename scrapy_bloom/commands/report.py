"""Write an HTML page about a filter: its fill, its false-positive rate, and a forecast.

PATH is a JOBDIR, a directory with the files of a filter, or one generation-*.bloom file. A crawl
may use the filter meanwhile: the command locks nothing and changes nothing. It reads the whole
filter. The page is one file that needs no other file and no network. The forecast is for the
settings of the project.

Examples:
  scrapy bloom report jobs/shop -o shop.html
  scrapy bloom report jobs/shop -o s.html --overwrite -s BLOOM_ERROR_RATE=1e-6
  scrapy bloom report redis://localhost:6379/0#shop:bloom -o shared.html
"""

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import datetime, timezone
from html import escape
from importlib import resources
from itertools import accumulate, starmap
from pathlib import Path
from string import Template

from scrapy.settings import Settings

from scrapy_bloom.commands.shared.arguments import add_place
from scrapy_bloom.commands.shared.figures import (
    filter_figures,
    queue_figures,
    queue_texts,
)
from scrapy_bloom.commands.shared.output import say
from scrapy_bloom.commands.shared.places import Figures, opened_place
from scrapy_bloom.commands.shared.project import load_project, state_text
from scrapy_bloom.exceptions import BloomError
from scrapy_bloom.filters.sizing import classic_fill_ratio
from scrapy_bloom.generations.policy import Generation, Policy, combined_rate, window_of
from scrapy_bloom.job.disk import create
from scrapy_bloom.pictures import (
    SCRAPY_SET_BYTES,
    Point,
    error_chart,
    import_pyplot,
    memory_chart,
)
from scrapy_bloom.text import counted, duration_text, in_words, number_text, share_text, size_text

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
        help='where to write the page ("-": the standard output)',
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the file if it exists")


def run(options: argparse.Namespace, settings: Settings) -> None:
    """Write the page."""
    to_stdout = str(options.output) == "-"
    if not to_stdout:
        _check_output(options.output, overwrite=options.overwrite)
    import_pyplot()  # reports a missing matplotlib before the work
    project = load_project(settings, options.spider, options.place.url)
    with (
        opened_place(options.place, project) as place,
        closing(place.filter(window=project.bloom.window_secs)) as reader,
    ):
        figures = {**filter_figures(reader, scans=True), "queue": queue_figures(place)}
        policy = replace(project.bloom.policy, window=window_of(reader.generations))
        page = _page(figures, reader.generations, policy)
    if to_stdout:
        sys.stdout.buffer.write(page.encode())
        return
    _write(options.output, page)
    say(f"{options.output}: {size_text(len(page.encode()))}")


def _check_output(path: Path, *, overwrite: bool) -> None:
    """Check that a file may be written, before the work for it begins."""
    if path.is_dir() or not path.parent.is_dir():
        raise BloomError(f"{path} can't be written: give a file in a directory that exists")
    if path.exists() and not overwrite:
        raise BloomError(f"{path} exists already; add --overwrite to replace it")


def _write(path: Path, text: str) -> None:
    """Write a file atomically."""
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")  # a pipe or a device cannot be replaced
        return
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with create(draft) as file:
            file.write(text.encode())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _page(figures: Figures, live: Sequence[Generation], policy: Policy) -> str:
    """Return the page as HTML.

    Args:
        figures: of the filter, with its bits counted.
        live: its generations, oldest first.
        policy: how it will grow.
    """
    now, room = figures["recorded"], figures["capacity"]
    later = grown(live, policy, max(4 * room, now + now // 4))
    points = course(later)
    mood, verdict, advice = _verdict(figures)
    rows = [_cells(each) for each in figures["generations"]]
    title = f"Bloom filter of {figures['spider']}" if figures["spider"] else "Bloom filter"
    template = resources.files(__package__).joinpath("report.html").read_text("utf-8")
    page = Template(template).substitute(
        title=escape(title),
        facts=_facts(figures),
        mood=mood,
        verdict=escape(verdict),
        advice=escape(advice),
        cards="\n".join(starmap(_card, _cards(figures))),
        columns="".join(f"<th{_kind(name)}>{name.strip(':')}</th>" for name in rows[0]),
        rows="\n".join(map(_row, rows)),
        window=escape(_WINDOW) if policy.window else "",
        error=error_chart(points, now, room, figures["error_rate_asked"]),
        forecast=escape(_forecast(policy)),
        memory=memory_chart(points, now),
        memory_text=escape(_memory(figures)),
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
    """Return the rate and the size of a filter when it had `requests` requests."""
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
        sum(generation.geometry.nbytes for generation in then),
    )


def _error_rate(figures: Figures) -> float:
    """Return the false-positive rate by the bits that are set, 0 to 1."""
    return combined_rate(each["scan"]["error_rate_now"] for each in figures["generations"])


def _facts(figures: Figures) -> str:
    window = figures["window_secs"]
    facts = {
        "Place": figures["location"],
        "Spider": figures["spider"] or "not said",
        "Fingerprinter": figures["fingerprinter"] or "not said",
        "Created": f"{_time(figures['generations'][0]['created'])} UTC",
        "Time window": duration_text(window) if window else "none",
        "State": state_text(figures["closed"], figures["in_use"]),
    }
    if queue := figures["queue"]:
        facts["Queue"] = "; ".join(queue_texts(queue))
    return "\n".join(f"<dt>{name}</dt><dd>{escape(value)}</dd>" for name, value in facts.items())


def _verdict(figures: Figures) -> tuple[str, str, str]:
    """Return the mood of the page ("good" or "bad"), its headline, and what to do."""
    rate, limit, count = _error_rate(figures), figures["error_rate_asked"], figures["recorded"]
    asked = f"At most {_one_in(limit)} was asked for."
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
    rate = _error_rate(figures)
    yield (
        "Error rate now",
        share_text(rate) if rate >= 0.05 or not rate else _one_in(rate, "1 in", "<"),
        f"{_rate(rate)}; asked for: {_rate(figures['error_rate_asked'])}",
    )
    drops = figures["expected_false_positives"]
    yield "Expected false positives", number_text(drops, 2), "pages lost so far"
    yield "Size", size_text(nbytes), f"Scrapy's set: {size_text(count * SCRAPY_SET_BYTES)}"
    set_bits = sum(each["bytes"] * each["scan"]["fill_ratio"] for each in figures["generations"])
    yield "Fill", share_text(set_bits / nbytes), "of the bits are set"
    yield (
        "Bytes per request",
        number_text(nbytes / count) if count else "none yet",
        f"{number_text(nbytes / room, 2)} when full; Scrapy's set: {SCRAPY_SET_BYTES}",
    )


def _card(name: str, value: str, more: str) -> str:
    more = "; ".join(f"<i>{escape(part)}</i>" for part in more.split("; "))
    return (
        f'<div class="card panel"><span>{name}</span><b>{escape(value)}</b>'
        f"<span>{more}</span></div>"
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


def _memory(figures: Figures) -> str:
    ours, others = figures["bytes"], figures["recorded"] * SCRAPY_SET_BYTES
    text = f"Now: {size_text(ours)}; Scrapy's set would take {size_text(others)}"
    if others > ours:
        return f"{text}, {in_words(others / ours, 2)} times as much."
    return (
        f"{text}. The filter has its full size from the start, and is smaller than the set from "
        f"{in_words(ours / SCRAPY_SET_BYTES)} requests on."
    )


def _time(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, timezone.utc):%Y-%m-%d %H:%M}"


def _rate(value: float) -> str:
    return f"{value:.{3 if value > 0.01 else 2}g}".replace("e-0", "e-")


def _one_in(rate: float, start: str = "one in", less: str = "less than") -> str:
    if rate < 1e-15:
        return f"{less} {start} 1,000 trillion"
    return f"{start} {in_words(1 / rate, 2)}"
