"""What all pictures have in common: matplotlib, imported when one is drawn, and the colours."""

from typing import Any

from scrapy_bloom.exceptions import BloomError

OURS, OTHER, THIRD, LIMIT, INK, GRID = (
    "#0b6e6e",  # this package
    "#d9822b",  # what it is compared with
    "#6b5ca5",
    "#b3261e",  # what was asked for, what must not be passed
    "#22303c",
    "#dfe5ea",
)


def import_pyplot() -> Any:
    """matplotlib.pyplot, drawing to files, in the style of all our pictures.

    Raises:
        BloomError: matplotlib is missing.
    """
    try:
        import matplotlib as mpl  # noqa: PLC0415 - an extra, and slow to import
    except ImportError:
        raise BloomError(
            "pictures need matplotlib, which is not installed: pip install 'scrapy-bloom[report]'"
        ) from None
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
