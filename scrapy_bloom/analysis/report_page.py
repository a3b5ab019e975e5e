"""Write the HTML page of `scrapy bloom report`: text and tables around the pictures."""

import time
from collections.abc import Iterator
from datetime import datetime, timezone
from html import escape
from importlib import resources
from itertools import starmap
from string import Template

from scrapy_bloom.analysis.pictures import error_chart, memory_chart
from scrapy_bloom.analysis.report import SCRAPY_SET_BYTES, Measured, Report, course
from scrapy_bloom.generations.backend import FilterStatus
from scrapy_bloom.text import counted, duration_text, in_words, number_text, share_text, size_text

_TOLERANCE = 1.1  # the counted rate scatters around the rate asked for
_WINDOW = "This filter has a time window: each generation expires one window after it is complete."


def report_page(report: Report) -> str:
    """Return the page as HTML; raise a BloomError if matplotlib is missing."""
    status, later = report.status, report.forecast()
    points = course(later)
    mood, verdict, advice = _verdict(report)
    rows = [
        _cells(name, generation, is_newest=generation is report.generations[-1])
        for name, generation in zip(report.names, report.generations, strict=True)
    ]
    template = resources.files("scrapy_bloom.analysis").joinpath("report.html").read_text("utf-8")
    page = Template(template).substitute(
        title=escape(f"Bloom filter of {report.spider}" if report.spider else "Bloom filter"),
        facts=_facts(report),
        mood=mood,
        verdict=escape(verdict),
        advice=escape(advice),
        cards="\n".join(starmap(_card, _cards(report))),
        columns="".join(f"<th{_kind(name)}>{name.strip(':')}</th>" for name in rows[0]),
        rows="\n".join(map(_row, rows)),
        window=escape(_WINDOW) if report.policy.window else "",
        error=error_chart(points, status),
        forecast=escape(_forecast(report, len(later))),
        memory=memory_chart(points, status.count),
        memory_text=escape(_memory(status)),
        made=escape(f"Made by scrapy bloom report, {_time(time.time())} UTC"),
    )
    return page.encode("utf-8", "backslashreplace").decode()  # a path may not be UTF-8


def _facts(report: Report) -> str:
    window = report.policy.window
    facts = {
        "Place": report.location,
        "Spider": report.spider or "not said",
        "Fingerprinter": report.fingerprinter or "not said",
        "Created": f"{_time(report.live[0].created_at)} UTC",
        "Time window": duration_text(window) if window else "none",
        "State": report.state,
    }
    return "\n".join(f"<dt>{name}</dt><dd>{escape(value)}</dd>" for name, value in facts.items())


def _verdict(report: Report) -> tuple[str, str, str]:
    """Return the mood of the page ("good" or "bad"), its headline, and what to do."""
    status, rate = report.status, report.error_rate
    asked = f"At most {_one_in(status.error_rate)} was asked for."
    if not status.count:
        return "good", "Nothing is recorded yet, so there are no false positives.", asked
    if rate >= 0.05:
        share = f"{share_text(rate)} of the new requests are mistaken for duplicates"
    else:
        share = f"{_one_in(rate, 'one new request in')} is mistaken for a duplicate"
    verdict = f"With {status.count:,} of {counted(status.capacity, 'request')} recorded, {share}."
    if rate <= _TOLERANCE * status.error_rate:
        return "good", verdict, asked
    advice = (
        f'{asked} With BLOOM_ON_FULL = "grow", the next run continues in a new generation, and the '
        "rate rises no more; to lower it, start with a new filter."
    )
    return "bad", verdict, advice


def _cards(report: Report) -> Iterator[tuple[str, str, str]]:
    status = report.status
    count, room = status.count, status.capacity
    yield "Recorded", f"{count:,}", f"of {room:,}: {share_text(count / room)}"
    rate = report.error_rate
    yield (
        "Error rate now",
        share_text(rate) if rate >= 0.05 or not rate else _one_in(rate, "1 in", "<"),
        f"{_rate(rate)}; asked for: {_rate(status.error_rate)}",
    )
    drops = status.expected_false_positives
    if 0 < drops < 0.001:
        yield "Expected false positives", "< 0.001", f"{_rate(drops)} pages lost so far"
    else:
        yield "Expected false positives", number_text(drops, 2), "pages lost so far"
    yield "Size", size_text(status.nbytes), f"Scrapy's set: {size_text(count * SCRAPY_SET_BYTES)}"
    yield "Fill", share_text(report.fill_ratio), "of the bits are set"
    yield (
        "Bytes per request",
        number_text(status.nbytes / count) if count else "none yet",
        f"{number_text(status.nbytes / room, 2)} when full; Scrapy's set: {SCRAPY_SET_BYTES}",
    )


def _card(name: str, value: str, more: str) -> str:
    more = "; ".join(f"<i>{escape(part)}</i>" for part in more.split("; "))
    return (
        f'<div class="card panel"><span>{name}</span><b>{escape(value)}</b>'
        f"<span>{more}</span></div>"
    )


def _cells(name: str, generation: Measured, *, is_newest: bool) -> dict[str, str]:
    """Return a row of the table by its columns; one that ends with ":" is text."""
    figures = generation.figures
    state = "open" if is_newest else "complete"
    if is_newest and figures.open_until:
        state = f"<span>open until <small>{_time(figures.open_until)}</small></span>"
    fill = generation.contents.fill_ratio
    bar = (
        f'<span><span class="bar"><i style="width:{100 * fill:.2f}%"></i>'
        f'<u style="left:{100 * generation.fill_when_full:.2f}%"></u></span>'
        f'<span class="share">{share_text(fill)}</span></span>'
    )
    return {
        "Generation:": f"{figures.number}<small>{escape(name)}</small>",
        "Created (UTC):": _time(figures.created_at),
        "Recorded": f"{figures.count:,}",
        "Capacity": f"{figures.capacity:,}",
        "Size": size_text(figures.geometry.nbytes),
        "Hashes": str(figures.geometry.num_hashes),
        "Fill:": bar,
        "Error rate": _rate(generation.contents.error_rate),
        "State:": state,
    }


def _row(cells: dict[str, str]) -> str:
    row = [
        f'<td{_kind(name)} data-name="{name.strip(":")}">{cell}</td>'
        for name, cell in cells.items()
    ]
    return f"<tr>{''.join(row)}</tr>"


def _kind(name: str) -> str:
    return ' class="text"' if name.endswith(":") else ""


def _forecast(report: Report, generations: int) -> str:
    on_full = report.policy.on_full
    text = f'The forecast is for BLOOM_ON_FULL = "{on_full}": '
    if generations > len(report.generations):
        text += (
            "a full generation is followed by a larger one with a lower error rate of its own, so "
            "the sum levels off."
        )
    elif on_full == "close":
        text += "the spider is closed at capacity; the forecast shows what would follow."
    else:
        text += "no generation follows a full one, and the rate keeps rising."
    if report.policy.window:
        text += " It assumes that none of the generations expires meanwhile."
    return text


def _memory(status: FilterStatus) -> str:
    ours, count = status.nbytes, status.count
    others = count * SCRAPY_SET_BYTES
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
