"""A plot as a PNG, and the style of all pictures."""

from pathlib import Path
from typing import Any

from benchmarks.shared.report import Plot

OURS, OTHER, THIRD, LIMIT, INK, GRID = (
    "#0b6e6e",  # this package
    "#d9822b",  # what it is compared with
    "#6b5ca5",
    "#b3261e",  # what was asked for, what must not be passed
    "#22303c",
    "#dfe5ea",
)

# Told apart without colours, too: each has its own marker and its own dashes.
_LOOKS = (
    (OURS, "o", "-"),
    (OTHER, "s", (0, (5, 2))),
    (THIRD, "^", (0, (1, 1.5))),
    (INK, "D", (0, (5, 2, 1, 2))),
    (LIMIT, "v", (0, (8, 3))),
    ("#8a96a3", "P", (0, (3, 1, 1, 1, 1, 1))),
    ("#3f7fbf", "X", "-"),
    ("#b58900", "*", (0, (5, 2))),
)
_MARKERS = 20  # at most, on a line


def import_pyplot() -> Any:
    """Return matplotlib.pyplot, drawing to files, in the style of all our pictures."""
    import matplotlib as mpl  # noqa: PLC0415 - slow to import

    mpl.use("Agg")
    import matplotlib.pyplot as plt  # noqa: PLC0415 - after the choice of what it draws to

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


def draw(plot: Plot, path: Path) -> None:
    """Draw a plot.

    Args:
        plot: of at most eight series.
        path: the image's file.
    """
    plt = import_pyplot()
    figure, axes = plt.subplots(figsize=(8.5, 4.6))
    for (name, points), (colour, marker, dashes) in zip(
        plot.series.items(), _LOOKS[: len(plot.series)], strict=True
    ):
        axes.plot(
            [x for x, _ in points],
            [y for _, y in points],
            label=name,
            color=colour,
            marker=marker,
            markersize=5.5,
            markevery=-(-len(points) // _MARKERS),
            linestyle=dashes,
            linewidth=1.8,
        )
    if plot.log_x:
        axes.set_xscale("log")
    if plot.log_y:
        axes.set_yscale("log")
    for axis, is_log in ((axes.xaxis, plot.log_x), (axes.yaxis, plot.log_y)):
        if not is_log:
            axis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    if not plot.log_y:
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    axes.set_title(plot.title, fontweight="bold")
    axes.set_xlabel(plot.x)
    axes.set_ylabel(plot.y)
    figure.legend(loc="outside lower center", ncols=min(len(plot.series), 3))
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)
