"""The picture of `scrapy bloom compare`."""

from collections.abc import Sequence
from io import BytesIO
from typing import Any

from scrapy_bloom.analysis.experiment import Contestant, Row
from scrapy_bloom.analysis.pictures import INK, OTHER, OURS, THIRD, import_pyplot
from scrapy_bloom.text import counted, per_cent_text, size_text

_COLOURS = (INK, "#8a96a3", THIRD, OTHER, OURS)  # of the contestants, in their order
_THEORY_STEPS = 25


def comparison(contestants: Sequence[Contestant], rows: Sequence[Row], kind: str) -> bytes:
    """Draw who took how many new URLs for seen, and in how much memory, as "png" or "svg"."""
    plt = import_pyplot()
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(12, 5), gridspec_kw={"width_ratios": [3, 2]}
    )
    figure.get_layout_engine().set(w_pad=0.15, h_pad=0.1, wspace=0.05)
    last = rows[-1]
    how_many = "all" if last.different == last.read else f"{last.different:,} of them"
    figure.suptitle(f"{counted(last.read, 'URL')}, {how_many} different", fontweight="bold")
    _draw_errors(left, contestants, rows)
    _draw_memory(right, contestants)
    drawn = BytesIO()
    figure.savefig(drawn, format=kind, dpi=150)
    plt.close(figure)
    return drawn.getvalue()


def _draw_errors(axes: Any, contestants: Sequence[Contestant], rows: Sequence[Row]) -> None:
    """Draw the wrongly seen URLs in per cent, as they were found and as theory has them."""
    last = rows[-1].different
    steps = sorted({max(1, last * step // _THEORY_STEPS) for step in range(1, _THEORY_STEPS + 1)})
    ends = []
    different = [row.different for row in rows]
    for index, (contestant, colour) in enumerate(zip(contestants, _COLOURS, strict=True)):
        found = [100 * row.wrong[index] / row.different for row in rows]
        dots = {"linewidth": 2.5, "marker": "o", "markersize": 5, "clip_on": False}
        axes.plot([0, *different], [0, *found], color=colour, zorder=3 + index, **dots)
        expected = [100 * contestant.theory(step) / step for step in steps]
        dashes = {"linewidth": 0.9, "linestyle": (0, (5, 4)), "label": None if index else "theory"}
        axes.plot([0, *steps], [0, *expected], color=INK, zorder=10, **dashes)
        ends.append((found[-1], f"{contestant.name}  {per_cent_text(found[-1])} %", colour))
    highest = max(axes.get_ylim()[1], 0.01)
    axes.set_ylim(0, highest)
    axes.set_xlim(0, last)
    heights = _apart([value for value, _, _ in ends], 0.055 * highest)
    for height, (value, text, colour) in zip(heights, ends, strict=True):
        style = {"va": "center", "annotation_clip": False, "fontweight": "bold"}
        axes.annotate(text, (last, value), (last * 1.035, height), color=colour, **style)
    axes.set_title("New URLs taken for seen ones")
    axes.set_xlabel("different URLs so far")
    axes.set_ylabel("per cent of them")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.legend(loc="upper left")


def _apart(values: Sequence[float], least: float) -> list[float]:
    """Return heights for labels: each at its value, or just so far above the one below it."""
    heights = list(values)
    lowest = -0.5 * least  # half a line above the axis, and so above its figures
    for index in sorted(range(len(values)), key=lambda each: values[each]):
        heights[index] = lowest = max(values[index], lowest + least)
    return heights


def _draw_memory(axes: Any, contestants: Sequence[Contestant]) -> None:
    """Draw the memory of each in the end; they differ by powers of ten."""
    sizes = [contestant.memory.nbytes for contestant in contestants]
    rows_from_top = range(len(contestants), 0, -1)
    axes.barh(rows_from_top, sizes, color=_COLOURS, height=0.6)
    axes.set_xscale("log")
    axes.set_axisbelow(True)
    low, high = min(sizes) / 4, max(sizes) * 10  # room for the figure at the longest bar
    ticks = [4 * 16**power for power in range(2, 12) if low <= 4 * 16**power <= high]
    axes.set_xticks(ticks, [size_text(tick).replace(".0 ", " ") for tick in ticks])
    axes.minorticks_off()
    axes.set_xlim(low, high)
    for index, size in zip(rows_from_top, sizes, strict=True):
        axes.annotate(
            size_text(size), (size, index), xytext=(5, 0), textcoords="offset points", va="center"
        )
    axes.set_yticks(rows_from_top, [contestant.name for contestant in contestants])
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    axes.set_title("Memory in the end (log scale)")
