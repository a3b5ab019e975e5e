"""The textbook experiment on a file of URLs, one a line: who takes new URLs for seen ones?

Each URL is shown to five memories:

  exact set      the URLs themselves; it tells what is new
  MD5 set        a digest of 16 bytes for each
  bitmap         one bit for each, where a single hash says
  Bloom filter   a classic small one
  this package   sized for as many URLs as the file has lines, at BLOOM_ERROR_RATE

A row for each tenth of the file tells how many new URLs were taken for seen ones so far, and how
many per cent of the different URLs that is. The last table has the memory that each takes in the
end, and what theory expects. Of 100,000 different URLs, the published figures are 4.83 % for the
bitmap and 2.97 % for the Bloom filter of the sizes that are preset here.

The URLs are taken byte for byte: none is made canonical, and there are no fingerprints as in a
crawl. Hashes and salts are fixed, so that the same file gives the same figures.

The file is read twice. The exact set and the MD5 set keep all different URLs in memory: about
250 bytes for each, and more if they are long.

Examples:
  scrapy bloom compare urls.txt
  scrapy bloom compare urls.txt --error-rate 1e-4 --plot compare.png
  scrapy bloom compare urls.txt --bitmap-bits 10M --bloom-bits 4808330 --json
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from scrapy.exceptions import UsageError
from scrapy.settings import Settings

from scrapy_bloom.analysis import experiment
from scrapy_bloom.analysis.experiment import Contestant, Row
from scrapy_bloom.analysis.experiment_picture import comparison
from scrapy_bloom.analysis.pictures import import_pyplot
from scrapy_bloom.commands.shared import arguments, output
from scrapy_bloom.commands.shared.list_formats import UNREADABLE, opened, reason
from scrapy_bloom.exceptions import BloomError
from scrapy_bloom.filters.bloom import BloomFilter
from scrapy_bloom.filters.counting import CountingBloomFilter
from scrapy_bloom.filters.sizing import MAX_HASHES
from scrapy_bloom.generations.policy import Policy
from scrapy_bloom.settings.settings import BloomSettings
from scrapy_bloom.text import number_text, per_cent_text, size_text

SYNTAX = "URLFILE [--plot FILE] [--error-rate P] [sizes of the others] [--json]"
HELP = "the textbook experiment: sets, bitmap and filters on a file of URLs"

_FORMATS = (".png", ".svg")
_COLUMNS = (
    ("memory:", "name", str),
    ("of:", "details", str),
    ("size", "bytes", size_text),
    ("bytes/URL", "bytes_per_url", "{:,.1f}".format),
    ("wrongly seen", "wrongly_seen", number_text),
    ("%", "per_cent", per_cent_text),
    ("theory %", "theory_per_cent", per_cent_text),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's own."""
    parser.add_argument("urls", type=arguments.path, metavar="URLFILE", help="the URLs, one a line")
    parser.add_argument(
        "--error-rate",
        type=arguments.error_rate,
        metavar="P",
        help="of this package's filter (default: BLOOM_ERROR_RATE)",
    )
    bits = partial(
        arguments.count_of, "bits", most=10**12, examples=", for example 480833, 10M or 1_000_000"
    )
    hashes = partial(arguments.count_of, "hashes", most=MAX_HASHES)
    for flag, kind, default, metavar, what in (
        ("--bitmap-bits", bits, experiment.BITMAP_BITS, "N", "size of the bitmap"),
        ("--bloom-bits", bits, experiment.BLOOM_BITS, "N", "size of the classic Bloom filter"),
        ("--bloom-hashes", hashes, experiment.BLOOM_HASHES, "K", "its hashes"),
    ):
        parser.add_argument(
            flag, type=kind, default=default, metavar=metavar, help=f"{what} (default: {default:,})"
        )
    arguments.add_output(parser, "--plot", what="a picture of it, PNG or SVG by its ending")
    parser.add_argument(
        "--counting",
        action="store_true",
        help="ours with counters, in four times the space: scrapy_bloom.CountingBloomFilter",
    )
    arguments.add_json(parser)


def run(options: argparse.Namespace, settings: Settings) -> None:
    """Do the experiment, and print and draw its figures."""
    if options.plot:
        _check_picture(options.plot, overwrite=options.overwrite)
    bloom = BloomSettings.from_settings(settings)
    rate = options.error_rate or bloom.error_rate
    with output.progress("Counting the URLs", None, "URLs") as advance:
        total = count_urls(options.urls, advance)
    # As a crawl would make it that expects so many requests.
    size = Policy(expected=total, error_rate=rate, on_full=bloom.on_full).first()
    kind = CountingBloomFilter if options.counting else BloomFilter
    compared = experiment.contestants(
        kind(size.capacity, size.error_rate, salt=experiment.SALT),
        bitmap_bits=options.bitmap_bits,
        bloom_bits=options.bloom_bits,
        bloom_hashes=options.bloom_hashes,
    )
    with output.progress("Comparing", total, "URLs") as advance:
        memories = [contestant.memory for contestant in compared]
        rows = list(experiment.compare(urls_in(options.urls), total, memories, advance))
    figures = _figures(compared, rows, rate)
    if options.json:
        output.print_json(figures)
    else:
        _print(figures)
    if options.plot:
        # Drawn before the file is opened: a failure must leave no half of a picture.
        options.plot.write_bytes(comparison(compared, rows, options.plot.suffix.lower()[1:]))
        output.note(f"The picture is in {options.plot}")


def _figures(compared: Sequence[Contestant], rows: Sequence[Row], rate: float) -> dict[str, Any]:
    last = rows[-1]
    names = [contestant.name for contestant in compared]
    expected = [contestant.theory(last.different) for contestant in compared]
    return {
        "urls": last.read,
        "different": last.different,
        "error_rate": rate,
        "rows": [
            {
                "read": read,
                "different": different,
                "wrongly_seen": dict(zip(names, wrong, strict=True)),
                "per_cent": dict(
                    zip(names, (100 * count / different for count in wrong), strict=True)
                ),
            }
            for read, different, wrong in rows
        ],
        "contestants": [
            {
                "name": contestant.name,
                "details": contestant.details,
                "bytes": contestant.memory.nbytes,
                "bytes_per_url": contestant.memory.nbytes / last.different,
                "wrongly_seen": wrong,
                "per_cent": 100 * wrong / last.different,
                "theory_wrongly_seen": theory,
                "theory_per_cent": 100 * theory / last.different,
            }
            for contestant, wrong, theory in zip(compared, last.wrong, expected, strict=True)
        ],
    }


def _print(figures: dict[str, Any]) -> None:
    names = [contestant["name"] for contestant in figures["contestants"]]
    output.print_table(
        [
            ("URLs read", "read", number_text),
            ("different", "different", number_text),
            *((name, name, str) for name in names),
        ],
        [
            row
            | {
                name: _wrong_text(row["wrongly_seen"][name], row["per_cent"][name])
                for name in names
            }
            for row in figures["rows"]
        ],
        title="New URLs taken for seen ones, so far",
    )
    output.print_table(_COLUMNS, figures["contestants"], title="\nIn the end")


def _wrong_text(count: int, per_cent: float) -> str:
    return f"{number_text(count)} ({per_cent_text(per_cent)} %)" if count else "0"


def _check_picture(path: Path, *, overwrite: bool) -> None:
    """Check all that can be wrong with the picture, before the work for it is done."""
    if path.suffix.lower() not in _FORMATS:
        allowed = " or ".join(_FORMATS)
        raise UsageError(f"--plot is {path}; allowed are names that end with {allowed}")
    output.check_output(path, overwrite=overwrite)
    import_pyplot()


def urls_in(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file, without the white space around them, and no empty ones.

    Raises BloomError if it is no regular file, or cannot be read.
    """
    try:
        if str(path) == "-" or (path.exists() and not path.is_file() and not path.is_dir()):
            raise BloomError(
                f"{path} can't be read twice, as a comparison has to; write the URLs to a file, "
                "and give its path"
            )
        with opened(path) as file:
            yield from filter(None, map(bytes.strip, file))
    except UNREADABLE as error:
        raise BloomError(
            f"{path} can't be read: {reason(error)}; give a file of URLs, one a line"
        ) from error


def count_urls(path: Path, advance: Callable[[int], None] = lambda _: None) -> int:
    """Count the URLs in a file, repeated ones included; raises BloomError, also if it has none."""
    count = 0
    for count, _ in enumerate(urls_in(path), start=1):
        if count % 100 == 0:
            advance(count)
    if not count:
        raise BloomError(f"{path} has no URLs in it: give a file of URLs, one a line")
    return count
