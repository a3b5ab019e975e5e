"""A plot as a PNG."""

from pathlib import Path

from benchmarks.shared.report import Plot
from scrapy_bloom.pictures import INK, LIMIT, OTHER, OURS, THIRD, import_pyplot

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


def draw(plot: Plot, path: Path) -> None:
    """Draw a plot.

    Args:
        plot: of at most eight series.
        path: the image's file.

    Raises:
        BloomError: matplotlib is missing.
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
