"""Draw pictures with matplotlib in one style, and the chart of a report."""

import io
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from scrapy_bloom.exceptions import BloomError
from scrapy_bloom.text import in_short

SCRAPY_SET_BYTES = 91  # per request, as docs/benchmarks.md has measured

OURS, OTHER, THIRD, LIMIT, INK, GRID = (
    "#0b6e6e",  # this package
    "#d9822b",  # what it is compared with
    "#6b5ca5",
    "#b3261e",  # what was asked for, what must not be passed
    "#22303c",
    "#dfe5ea",
)

# Their names in the style of a report, which has others in a dark room.
_NAMES = {
    OURS: "ours", OTHER: "other", THIRD: "third", LIMIT: "limit", INK: "ink", GRID: "line"
}  # fmt: skip

_METADATA = ("Creator", "Date", "Format", "Type")  # that matplotlib writes if it is not told
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def import_pyplot() -> Any:
    """Return matplotlib.pyplot, drawing to files, in the style of all our pictures.

    Raises BloomError if matplotlib is missing, or cannot be imported.
    """
    try:
        import matplotlib as mpl  # noqa: PLC0415 - an extra, and slow to import

        mpl.use("Agg")
        import matplotlib.pyplot as plt  # noqa: PLC0415 - after the choice of what it draws to
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "matplotlib":
            raise BloomError(
                "pictures need matplotlib, which is not installed: pip install 'matplotlib>=3.9.2'"
            ) from None
        reason = " ".join(str(error).split())
        raise BloomError(
            f"pictures need matplotlib, which is installed but cannot be imported: {reason}; "
            "upgrade it: pip install --upgrade 'matplotlib>=3.9.2'"
        ) from None

    plt.rcParams.update(
        {
            "axes.edgecolor": INK,
            "axes.grid": True,
            "axes.labelcolor": INK,
            "axes.spines.right": False,
            "axes.spines.top": False,
            "figure.constrained_layout.use": True,
            "font.family": "sans-serif",
            "font.size": 10,
            "grid.color": GRID,
            "legend.frameon": False,
            "svg.fonttype": "path",
            "svg.hashsalt": "scrapy_bloom",
            "text.color": INK,
            "xtick.color": INK,
            "ytick.color": INK,
        }
    )
    return plt


class Point(NamedTuple):
    """A filter at one moment of its crawl."""

    requests: int  # recorded until then
    error_rate: float  # 0 to 1


def error_chart(course: Sequence[Point], now: int, room: int, asked: float) -> str:
    """Draw the error rate against the requests recorded; return an SVG element.

    Args:
        course: points from the first request to the last of a forecast.
        now: how many requests are recorded.
        room: the capacity.
        asked: the error rate that was asked for.
    """
    so_far = [point for point in course if 0 < point.requests <= now]
    ahead = [point for point in course if point.requests >= max(now, 1)]
    with _axes(430, 350) as (figure, axes):
        for points, line, name in ((so_far, "-", "so far"), (ahead, "--", "forecast")):
            requests = [point.requests for point in points]
            rates = [max(point.error_rate, 1e-300) for point in points]
            axes.plot(requests, rates, color=OURS, label=name, linestyle=line, linewidth=2)
        rate = so_far[-1].error_rate if so_far else 0.0
        highest = max(asked, course[-1].error_rate)
        lowest = min(asked * 1e-3, max(rate / 30, asked * 1e-14))
        axes.set_yscale("log")
        axes.set_ylim(lowest, min(highest * 30, 2.0))
        axes.set_xlim(0, course[-1].requests)
        axes.yaxis.set_major_formatter(_power_of_ten)
        axes.minorticks_off()
        axes.axhline(asked, color=LIMIT, linewidth=1.5)
        text = f"target: {asked:.2g}".replace("e-0", "e-")
        _write(axes, text, (1, asked), (-4, 4), ("axes fraction", "data"), color=LIMIT)
        _draw_line_at(axes, room, f"capacity: {in_short(room)}", row=0, color=THIRD)
        are_near = abs(now - room) < 0.36 * course[-1].requests
        _draw_line_at(axes, now, f"now: {in_short(now)}", row=int(are_near), color=INK)
        if rate >= lowest:
            axes.plot([now], [rate], "o", color=OURS, markersize=7, zorder=5)
        axes.set_ylabel("error rate")
        axes.legend(loc="lower right")
        return _svg(figure, "Error rate")


@contextmanager
def _axes(width: int, height: int) -> Iterator[tuple[Any, Any]]:
    """Make a figure of so many units, with one pair of axes, for `_svg`."""
    plt = import_pyplot()
    # Text stays text: smaller, found by a search, and in the page's own type.
    with plt.rc_context({"font.size": 12, "svg.fonttype": "none"}):
        figure, axes = plt.subplots(figsize=(width / 72, height / 72))
        try:
            axes.xaxis.set_major_formatter(lambda value, _: in_short(value))
            axes.set_axisbelow(True)
            axes.tick_params(length=0, pad=8)
            yield figure, axes
        finally:
            plt.close(figure)


def _draw_line_at(axes: Any, requests: int, text: str, *, row: int, color: str) -> None:
    """Draw a vertical line, with its text in a row of its own above the axes."""
    side = -1 if requests > 0.6 * axes.get_xlim()[1] else 1
    axes.axvline(requests, color=color, linewidth=1.2, linestyle=(0, (1, 2)))
    offset = (4 * side, 3 + 16 * row)
    _write(axes, text, (requests, 1), offset, ("data", "axes fraction"), color=color)


def _write(
    axes: Any, text: str, at: Any, offset: tuple[int, int], coords: Any, **style: Any
) -> None:
    """Write a text next to a point, on the left if its offset is negative."""
    side = "right" if offset[0] < 0 else "left"
    axes.annotate(text, at, offset, xycoords=coords, textcoords="offset points", ha=side, **style)


def _power_of_ten(value: float, _: int) -> str:
    return "10" + str(round(math.log10(value))).translate(_RAISED) if value > 0 else ""


def _svg(figure: Any, title: str) -> str:
    """Return a figure as an element of a page.

    The style of the page defines the colours.
    """
    file = io.StringIO()
    figure.savefig(file, format="svg", transparent=True, metadata=dict.fromkeys(_METADATA))
    drawn = file.getvalue()
    drawn = drawn[drawn.index("<svg") :]
    # That style would be for the whole page.
    drawn = re.sub(r"<defs>\s*<style.*?</defs>\s*", "", drawn, count=1, flags=re.DOTALL)
    for colour, variable in _NAMES.items():
        drawn = drawn.replace(colour, f"var(--{variable})")
    head = rf'<svg role="img" \1><title>{title}</title>'
    return re.sub(r'<svg [^>]*(viewBox="[^"]*")[^>]*>', head, drawn, count=1)
