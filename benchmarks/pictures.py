"""The pictures of the documents: `python -m benchmarks.pictures` draws them, into docs/pictures.

memory.svg   of README: Scrapy's set against the filter
badge-*.svg  of README: what is needed, as pyproject.toml has it
report.png   of docs/monitoring.md: `scrapy bloom report` of the example's crawl, in Chromium
watch.svg    of README and docs/distributed.md: `scrapy bloom info --watch` of a shared crawl
"""

import argparse
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from benchmarks.shared.plots import GRID, INK, OTHER, OURS, THIRD, import_pyplot
from benchmarks.shared.results import DIRECTORY as RESULTS
from scrapy_bloom.commands.plan import SCRAPY_SET_BYTES
from scrapy_bloom.filters.sizing import choose_geometry
from scrapy_bloom.text import in_short, size_text

ROOT = Path(__file__).resolve().parents[1]
PICTURES = ROOT / "docs" / "pictures"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
MOST_REQUESTS = 100_000_000
TIMEOUT_SECS = 120
WATCH_COLUMNS, WATCH_PORT, WATCH_DONE = 92, 8990, 150
SCREEN = (1100, 1480)  # pixels
DARK = {  # the colours of a picture, and those for readers with a dark theme
    "#ffffff": "#1e2129",
    INK: "#d8dee6",
    GRID: "#3a414c",
    OURS: "#3fc1c1",
    OTHER: "#f0a45d",
    THIRD: "#b3a4f5",
}


def main() -> None:
    """Draw all of them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pictures", description=__doc__)
    parser.add_argument("--output", type=Path, default=PICTURES, metavar="DIRECTORY")
    parser.add_argument("--no-crawls", action="store_true", help="leave out what needs a crawl")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    draw_memory(options.output / "memory.svg")
    draw_badges(options.output)
    if not options.no_crawls:
        draw_watch(options.output / "watch.svg")
        with tempfile.TemporaryDirectory(prefix="example-") as directory:
            job = Path(directory, "jobs", "docs")
            crawl = ("-m", "scrapy", "crawl", "docs", "-s", f"JOBDIR={job}")
            _run(*crawl, cwd=ROOT / "example_project")
            photograph_report(job, options.output / "report.png")


def draw_memory(path: Path) -> None:
    """Draw what Scrapy's set and the filter take, by the number of requests."""
    plt = import_pyplot()
    plt.rcParams["font.size"] = 12  # read on a telephone, too
    figure, axes = plt.subplots(figsize=(7.2, 3.6))
    requests = [MOST_REQUESTS * part // 100 for part in range(1, 101)]
    lines = {
        "Scrapy's set": (OTHER, [n * SCRAPY_SET_BYTES for n in requests]),
        "this filter, one error in a billion": (OURS, [_filter_bytes(n, 1e-9) for n in requests]),
        "one in a million": (THIRD, [_filter_bytes(n, 1e-6) for n in requests]),
    }
    for row, (name, (colour, sizes)) in enumerate(lines.items()):
        axes.plot(requests, [size / 2**30 for size in sizes], color=colour, linewidth=2.4)
        axes.annotate(
            f"{name}: {size_text(sizes[-1])}",
            (requests[-1], sizes[-1] / 2**30),
            ((-6, 0), (0, 10), (0, -17))[row],
            textcoords="offset points",
            ha="right",
            color=colour,
            fontweight="bold",
        )
    for name, colour in (("RFPDupeFilter, requests.seen", OTHER), ("LocalBackend, file", THIRD)):
        points = [point for point in _measured(name) if point[0] >= MOST_REQUESTS / 100]
        axes.plot([n for n, _ in points], [mb * 1e6 / 2**30 for _, mb in points], "o", color=colour)
    axes.set_xlim(0, MOST_REQUESTS)
    axes.set_ylim(-0.8, 9)
    axes.xaxis.set_major_formatter(lambda value, _: in_short(value))
    axes.set_xlabel("requests seen (dots: measured)")
    axes.set_ylabel("memory, GiB")
    drawing = io.StringIO()
    figure.savefig(drawing, format="svg", metadata={"Date": None, "Creator": None})
    plt.close(figure)
    path.write_text(_with_dark_colours(drawing.getvalue()), "utf-8")


def _with_dark_colours(drawing: str) -> str:
    """Return a picture that has other colours, and its own ground, where the reader's are dark."""
    light = dark = ""
    for number, (colour, in_the_dark) in enumerate(DARK.items()):
        drawing = drawing.replace(f": {colour}", f": var(--c{number})")
        light += f"--c{number}:{colour};"
        dark += f"--c{number}:{in_the_dark};"
    style = f":root{{{light}}}@media(prefers-color-scheme:dark){{:root{{{dark}}}}}"
    return drawing.replace(" <defs>", f" <style>{style}</style>\n <defs>", 1)


def draw_badges(directory: Path) -> None:
    """Draw what the project needs, so that README shows it without asking another server."""
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    for name, pattern in (
        ("Python", r'^requires-python = ">=(.+)"'),
        ("Scrapy", r'^    "scrapy>=(.+)"'),
        ("licence", r'^license = "(.+)"'),
    ):
        (value,) = re.findall(pattern, project, re.MULTILINE)
        value += "" if name == "licence" else " or later"
        left, right = (10 + 7 * len(text) for text in (name, value))
        (directory / f"badge-{name.lower()}.svg").write_text(
            f"""<svg xmlns="http://www.w3.org/2000/svg" role="img"
width="{left + right}" height="20">
<title>{name}: {value}</title>
<rect width="{left}" height="20" fill="{INK}"/>
<rect x="{left}" width="{right}" height="20" fill="{OURS}"/>
<g fill="#ffffff" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11">
<text x="5" y="14" textLength="{left - 10}">{name}</text>
<text x="{left + 5}" y="14" textLength="{right - 10}">{value}</text>
</g>
</svg>
""",
            "utf-8",
        )


def photograph_report(job: Path, path: Path) -> None:
    """Write a picture of the first screens of a job's report, as a browser shows it.

    Raises:
        SystemExit: there is no Chromium.
    """
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise SystemExit("Chromium is missing: apt-get install chromium")
    with tempfile.TemporaryDirectory() as directory:
        page = Path(directory, "report.html")
        _run("-m", "scrapy", "bloom", "report", job.name, "-o", str(page), cwd=job.parent)
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        command += ["--disable-dev-shm-usage", f"--user-data-dir={directory}/profile"]
        command += [f"--window-size={SCREEN[0]},{SCREEN[1]}", f"--screenshot={path}"]
        subprocess.run(
            [*command, page.as_uri()], check=True, capture_output=True, timeout=TIMEOUT_SECS
        )


def draw_watch(path: Path) -> None:
    """Draw what `scrapy bloom info` prints while two workers share the example crawl."""
    console = Console(record=True, width=WATCH_COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(_watched_crawl(), markup=False, highlight=False)
    command = "scrapy bloom info redis://127.0.0.1:8971/0#shared:bloom --watch"
    drawn = console.export_svg(title=command, unique_id="watch")
    drawn = re.sub(r"@font-face {.*?}\n", "", drawn, flags=re.DOTALL)  # of another server
    path.write_text(drawn, "utf-8")


def _watched_crawl() -> str:
    """Return what a watch of the example project's shared crawl prints once some pages are done."""
    env = {**os.environ, "EXAMPLE_PORT": str(WATCH_PORT)}
    place = f"redis://127.0.0.1:{WATCH_PORT + 1}/0#shared:bloom"

    def start(stack: ExitStack, *arguments: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT / "example_project",
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        stack.callback(process.wait)
        stack.callback(process.kill)
        return process

    with ExitStack() as stack:
        servers = start(stack, "-m", "example.shared")
        stack.callback(servers.communicate, b"\n")  # Enter ends its Valkey server, too
        assert servers.stdout is not None
        servers.stdout.readline()
        slow = ("-s", "DOWNLOAD_DELAY=0.02", "-s", "BLOOM_SHARED_LIMITS=False")
        for _ in range(2):
            start(stack, "-m", "scrapy", "crawl", "shared", *slow)
        end, watching, lines = time.monotonic() + TIMEOUT_SECS, None, list[str]()
        while time.monotonic() < end:
            watching = watching or start(stack, "-m", "scrapy", "bloom", "info", place, "--watch=1")
            assert watching.stdout is not None
            line = watching.stdout.readline().decode()
            if not line:  # there is no filter yet
                watching = None
            elif re.fullmatch(r"\d\d:\d\d:\d\d\n", line):  # the next figures
                text, lines = "".join(lines), [line]
                done = re.search(r"; ([\d,]+) done; .* pages/s", text)
                if done and int(done[1].replace(",", "")) > WATCH_DONE:
                    return text.replace(str(WATCH_PORT + 1), "8971")
            else:
                lines.append(line)
    raise SystemExit("the shared crawl of the example project does not progress")


def _run(*arguments: str, cwd: Path) -> None:
    subprocess.run(
        [sys.executable, *arguments], cwd=cwd, check=True, capture_output=True, timeout=TIMEOUT_SECS
    )


def _filter_bytes(requests: int, error_rate: float) -> int:
    # A filter that may grow keeps half of the error rate for what comes later.
    return choose_geometry(requests, error_rate / 2).nbytes


def _measured(name: str) -> list[tuple[int, float]]:
    """MB of memory by the number of fingerprints, of the benchmark `memory`."""
    kept = json.loads((RESULTS / "memory.json").read_text("utf-8"))
    memory = next(plot for plot in kept["section"]["plots"] if plot["title"] == "Memory")
    return [(int(n), mb) for n, mb in memory["series"][name]]


if __name__ == "__main__":
    main()
