"""Delete a filter, so that everything is crawled again. It asks before it does.

PATH is a JOBDIR or a BLOOM_DIR. Only the filter's own files are deleted, not Scrapy's queue of a
paused job, and none while a crawl runs. In Redis nobody can know whether crawlers use a filter;
those that do go on with an empty one.

Examples:
  scrapy bloom reset jobs/shop --yes
  scrapy bloom reset redis://localhost:6379/0 --key shop:bloom --yes
"""

import argparse
import sys
from contextlib import closing
from pathlib import Path

from scrapy.settings import Settings

from scrapy_bloom.commands.shared.arguments import add_place, is_redis
from scrapy_bloom.commands.shared.output import note, say
from scrapy_bloom.commands.shared.project import connect, load_project
from scrapy_bloom.exceptions import BloomError, StorageError
from scrapy_bloom.files import forgotten as forgotten_file
from scrapy_bloom.files.reader import filter_directory
from scrapy_bloom.job import paths as jobdir
from scrapy_bloom.job.locks import lock_directory
from scrapy_bloom.text import size_text

SYNTAX = "PATH|REDIS-URL [--key NAME] [--spider NAME] [--yes]"
HELP = "delete a filter, so that everything is crawled again"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's own."""
    add_place(parser)
    parser.add_argument("-y", "--yes", action="store_true", help="do not ask")


def run(options: argparse.Namespace, settings: Settings) -> None:
    """Delete a filter."""
    if is_redis(options.place):
        _reset_in_redis(options, settings)
    else:
        _reset_files(Path(options.place), yes=options.yes)


def _reset_files(path: Path, *, yes: bool) -> None:
    directory = filter_directory(path)
    if path.is_file() or not jobdir.filter_files(directory):
        raise StorageError(f"{path} holds no filter; give a JOBDIR or a BLOOM_DIR")
    lock = lock_directory(directory)
    try:
        # What is in them does not matter: a damaged one is a reason to be here.
        files = jobdir.filter_files(directory)
        size = size_text(sum(file.stat().st_size for file in files))
        _confirm(f"Delete the filter in {directory}: {len(files)} file(s), {size}?", yes=yes)
        for file in [*reversed(files), *forgotten_file.files(directory)]:
            file.unlink()
    except OSError as error:
        raise StorageError(f"{directory}: a file cannot be deleted: {error}") from error
    finally:
        lock.release()
    say(f"Deleted {len(files)} file(s) in {directory}")
    job_dir = directory.parent
    if directory.name == "bloom" and (job_dir / jobdir.SEEN).exists():
        note(
            f"{job_dir / jobdir.SEEN} is still there: the next crawl with this JOBDIR imports "
            "it into its new filter, unless you move it away"
        )


def _reset_in_redis(options: argparse.Namespace, settings: Settings) -> None:
    store = connect(options, load_project(settings, options.spider, options.place))
    name = f"{store.key} in {store.server.address}"
    with closing(store.server):
        stored = store.read()
        if stored.info is None:
            store.read_filter()  # says best that there is none
        generations = stored.generations
        count = sum(generation.count for generation in generations)
        size = size_text(sum(generation.geometry.nbytes for generation in generations))
        _confirm(
            f"Delete the filter {name}: {count:,} requests, {size}? Crawlers that use it now go on "
            "with an empty one.",
            yes=options.yes,
        )
        store.reset()
    say(f"Deleted the filter {name}")


def _confirm(question: str, *, yes: bool) -> None:
    if yes:
        return
    if not sys.stdin.isatty():
        raise BloomError(f"{question} Nobody can be asked here: add --yes to delete it")
    sys.stderr.write(f"{question} [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in {"y", "yes"}:
        raise BloomError("nothing was deleted")
