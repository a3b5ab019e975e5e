"""Delete a filter and its queue, so that the next crawl starts over.

The command asks before it deletes anything, and says how many requests are recorded and pending.
With --queue, it deletes only the queue: its requests are not crawled, and the next crawl uses the
filter as it is.

Nothing is deleted while a crawl uses it. In Redis, --force deletes it anyway, and the workers start
over. Scrapy's own queue and requests.seen in a JOBDIR are left as they are.

Examples:
  scrapy bloom reset jobs/shop --yes
  scrapy bloom reset redis://localhost:6379/0 --key shop:bloom --queue --yes
  scrapy bloom reset redis://localhost:6379/0 --key shop:bloom --yes
"""

import argparse
from contextlib import closing

from scrapy.settings import Settings

from scrapy_bloom.commands.shared.arguments import add_place, add_yes
from scrapy_bloom.commands.shared.figures import counts_text, filter_figures, queue_figures
from scrapy_bloom.commands.shared.output import confirm, say
from scrapy_bloom.commands.shared.places import Place, opened_place
from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.text import counted, size_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the subcommand."""
    add_place(parser, is_optional=True)
    parser.add_argument("--queue", action="store_true", help="delete the queue, not the filter")
    parser.add_argument(
        "--force",
        action="store_true",
        help="also while workers in Redis use it, or if the queue is damaged",
    )
    add_yes(parser)


def run(options: argparse.Namespace, settings: Settings) -> None:
    """Delete a filter and its queue."""
    with opened_place(options.place, settings) as place:
        parts = [_filter_text(place)] if not options.queue and place.has_filter() else []
        has_filter = bool(parts)
        if queue := _queue_text(place, force=options.force):
            parts.append(queue)
        if not parts:
            place.queue() if options.queue else place.filter()  # reports what is missing
        what = " and ".join(parts)
        sentences = [f"Delete {what}?"]
        if not has_filter:
            sentences.append(
                "Its requests are not crawled: the filter, if there is one, has recorded them."
            )
        with place.unused(force=options.force) as users:
            confirm(" ".join([*sentences, users]).rstrip(), options)
        with place.unused(force=options.force):  # a crawl may have begun before the user agreed
            place.remove(has_filter=has_filter)
        say(f"Deleted {what}")


def _filter_text(place: Place) -> str:
    try:
        with closing(place.filter()) as reader:
            figures = filter_figures(reader)
    except StorageError:
        return f"the filter of {place.name} (damaged)"
    number, size = counted(figures["recorded"], "request"), size_text(figures["bytes"])
    return f"the filter of {place.name} ({number} recorded, {size})"


def _queue_text(place: Place, *, force: bool) -> str:
    """Describe the queue at a place; return an empty text if there is none."""
    try:
        figures = queue_figures(place)
    except StorageError:
        if not force:
            raise
        return f"the queue of {place.name} (damaged)"
    return f"the queue of {place.name} ({counts_text(figures)})" if figures else ""
