"""Write an HTML page about a filter: its fill, its false-positive rate, and a forecast.

PATH is a JOBDIR, a BLOOM_DIR, or one generation-*.bloom file. A crawl may use the filter
meanwhile: the command locks nothing and changes nothing. It reads the whole filter. The page is
one file that needs no other file and no network. The forecast is for the settings of the project.

Examples:
  scrapy bloom report jobs/shop -o shop.html
  scrapy bloom report jobs/shop -o shop.html --overwrite -s BLOOM_ON_FULL=warn
  scrapy bloom report redis://localhost:6379/0 --key shop:bloom -o shared.html
"""

import argparse
import os
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from scrapy.settings import Settings

from scrapy_bloom.analysis.pictures import import_pyplot
from scrapy_bloom.analysis.report import report_page
from scrapy_bloom.commands.shared.arguments import add_place
from scrapy_bloom.commands.shared.figures import filter_figures
from scrapy_bloom.commands.shared.output import say
from scrapy_bloom.commands.shared.project import (
    load_project,
    opened_place,
    reader_of,
    state_text,
)
from scrapy_bloom.exceptions import BloomError
from scrapy_bloom.generations.policy import window_of
from scrapy_bloom.job.disk import create
from scrapy_bloom.text import size_text


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
    project = load_project(settings, options.spider, options.place)
    window = project.bloom.window_secs
    with (
        opened_place(options, project) as place,
        closing(reader_of(place, window=window)) as reader,
    ):
        figures = filter_figures(reader, scans=True)
        if isinstance(place, Path):
            figures["location"] = str(place.absolute())
        state = state_text(figures["closed"], figures["in_use"])
        policy = replace(project.bloom.policy, window=window_of(reader.generations))
        page = report_page(figures, state, [each.figures for each in reader.generations], policy)
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
