"""Delete a filter and its queue, so that the next crawl starts over.

The command asks before it deletes anything. Nothing is deleted while a crawl
uses it. Scrapy's own queue and requests.seen in a JOBDIR stay as they are.

Examples:
  scrapy bloom reset jobs/shop --yes
  scrapy bloom reset redis://localhost:6379/0#shop:bloom --yes
"""

import argparse

from scrapy.settings import Settings

from scrapy_bloom.commands.shared.cli import add_shared, confirm, say
from scrapy_bloom.commands.shared.figures import counts_text, read_filter, read_queue
from scrapy_bloom.commands.shared.places import MissingError, Place, opened_place
from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.text import counted, size_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_shared(parser, "[place]", "--spider")
    parser.add_argument(
        "--queue",
        action="store_true",
        help="delete only the queue: its requests are not crawled, and the next crawl uses the "
        "filter as it is",
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="also while workers in Redis use it, which start over, or if the queue is damaged",
    )
    add_shared(parser, "--yes")


def run(options: argparse.Namespace, settings: Settings) -> None:
    with opened_place(options, settings) as (place, _):
        of_filter = "" if options.queue else _filter_text(place)
        of_queue = _queue_text(place, is_forced=options.force)
        if not (of_filter or of_queue):
            place.queue() if options.queue else place.reader()  # reports what is missing
        what = " and ".join(filter(None, (of_filter, of_queue)))
        hint = " Its requests are not crawled: the filter, if there is one, has recorded them."
        question = f"Delete {what}?{'' if of_filter else hint}"
        if not options.force:
            place.check_unused()
        confirm(question, options)
        if not options.force:
            place.check_unused()  # a crawl may have begun before the user agreed
        place.remove(has_filter=bool(of_filter))
        say(f"Deleted {what}")


def _filter_text(place: Place) -> str:
    """Describe the filter at a place; return an empty text if there is none."""
    try:
        figures = read_filter(place.reader())
    except MissingError:
        return ""
    except StorageError:
        return f"the filter of {place.name} (damaged)"
    number, size = counted(figures["recorded"], "request"), size_text(figures["bytes"])
    return f"the filter of {place.name} ({number} recorded, {size})"


def _queue_text(place: Place, *, is_forced: bool) -> str:
    """Describe the queue at a place and its workers; return an empty text if there is none."""
    try:
        queue = read_queue(place)
    except StorageError:
        if not is_forced:
            raise
        return f"the queue of {place.name} (damaged)"
    if queue is None:
        return ""
    users = [worker["name"] for worker in queue["workers"] or () if worker["is_alive"]]
    used = f"; workers use it now, and start over: {', '.join(users)}" if users else ""
    return f"the queue of {place.name} ({counts_text(queue)}{used})"
