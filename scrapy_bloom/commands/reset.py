"""Delete a filter, so that the next crawl starts over.

The command asks before it deletes anything. PATH is a JOBDIR or a BLOOM_DIR: only the filter's own
files are deleted, not Scrapy's queue of a paused job, and nothing while a crawl runs. In Redis,
the queue that workers share is deleted with the filter. Crawlers with another scheduler that use
the filter continue with an empty one.

With --queue, only the queue in Redis is deleted: its pending requests are not crawled, and the
next crawl uses the filter as it is.

Nothing is deleted while workers use the queue, unless --force is given. The workers then start
their crawl over: with an empty filter, or, with --queue, with the filter as it is.

Examples:
  scrapy bloom reset jobs/shop --yes
  scrapy bloom reset redis://localhost:6379/0 --key shop:bloom --queue --yes
  scrapy bloom reset redis://localhost:6379/0 --key shop:bloom --yes
"""

import argparse
from pathlib import Path

from scrapy.exceptions import UsageError
from scrapy.settings import Settings

from scrapy_bloom.commands.shared.arguments import add_place, add_yes
from scrapy_bloom.commands.shared.output import confirm, note, say
from scrapy_bloom.commands.shared.project import opened_place, place_name
from scrapy_bloom.exceptions import RefusedError, StorageError
from scrapy_bloom.files.directory import filter_directory, other_files
from scrapy_bloom.job import jobdir
from scrapy_bloom.queues.shared_state import QueueState, read_state, remove_queue
from scrapy_bloom.redis.making import remove_filter
from scrapy_bloom.redis.stored import RedisPlace, read_existing
from scrapy_bloom.text import counted, size_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the subcommand."""
    add_place(parser, is_optional=True)
    parser.add_argument(
        "--queue", action="store_true", help="in Redis: delete the shared queue, not the filter"
    )
    parser.add_argument(
        "--force", action="store_true", help="in Redis: also while workers use the queue"
    )
    add_yes(parser)


def run(options: argparse.Namespace, settings: Settings) -> None:
    """Delete a filter."""
    with opened_place(options, settings) as place:
        if not isinstance(place, Path):
            _reset_in_redis(place, options)
        elif options.queue or options.force:
            option = "--queue" if options.queue else "--force"
            raise UsageError(f"{option} is for a queue in Redis: give the URL of its server")
        else:
            _reset_files(place, options)


def _reset_files(path: Path, options: argparse.Namespace) -> None:
    directory = filter_directory(path)
    if path.is_file() or not jobdir.filter_files(directory):
        raise StorageError(f"{path} holds no filter; give a JOBDIR or a BLOOM_DIR")
    lock = jobdir.lock_directory(directory)
    try:
        # The files are not read: they may be damaged.
        files = jobdir.filter_files(directory)
        size = size_text(sum(file.stat().st_size for file in files))
        number = counted(len(files), "file")
        confirm(f"Delete the filter in {directory}: {number}, {size}?", options)
        for file in [*reversed(files), *other_files(directory)]:
            file.unlink()
    except OSError as error:
        raise StorageError(f"{directory}: a file cannot be deleted: {error}") from error
    finally:
        lock.release()
    say(f"Deleted {number} in {directory}")
    job_dir = directory.parent
    if directory.name == "bloom" and (job_dir / jobdir.SEEN).exists():
        note(
            f"{job_dir / jobdir.SEEN} is still there: the next crawl with this JOBDIR imports "
            "it into its new filter, unless you move it away"
        )


def _reset_in_redis(place: RedisPlace, options: argparse.Namespace) -> None:
    name = place_name(place)
    if options.queue:
        try:
            queue = _queue(place, options)
        except RefusedError as error:
            if not options.force:
                raise
            question = f"Delete the queue {name} unread? {error}."
        else:
            if queue is None:
                raise StorageError(
                    f"{place.server.address} has no queue {place.key!r}; nothing was deleted"
                )
            question = f"Delete the queue {name} with {counted(queue.total, 'request')}?"
            question += _users(queue, "they start their crawl over, with the filter as it is")
        confirm(question, options)
        if not options.force:  # a worker may have joined before the answer
            _queue(place, options)
        remove_queue(place.server, place.key)
        say(f"Deleted the queue {name}")
        return
    queue = _queue(place, options)
    stored = read_existing(*place)
    count = sum(each.count for each in stored.generations)
    size = size_text(sum(each.geometry.nbytes for each in stored.generations))
    what = f"the filter {name}: {counted(count, 'request')}, {size}"
    users = " Crawlers that use it now go on with an empty one."
    if queue:
        what += f", and its queue with {counted(queue.total, 'request')}"
        users = _users(queue, "they start their crawl over, with an empty filter")
    confirm(f"Delete {what}?{users}", options)
    _queue(place, options)
    remove_filter(*place, stored.id)
    say(f"Deleted the filter {name}" + (" and its queue" if queue else ""))


def _queue(place: RedisPlace, options: argparse.Namespace) -> QueueState | None:
    """Return the state of the queue; raise a StorageError if workers use it, without --force."""
    queue = read_state(place.server, place.key)
    if queue and queue.live_workers and not options.force:
        workers = counted(len(queue.live_workers), "worker uses", "workers use")
        raise StorageError(
            f"{workers} the queue {place.key!r} in "
            f"{place.server.address} now: {_names(queue)}; nothing was deleted. Stop them, and "
            "try again (one that was killed counts until its lease has expired, "
            "BLOOM_QUEUE_LEASE_SECS); or add --force"
        )
    return queue


def _users(queue: QueueState, consequence: str) -> str:
    if queue.live_workers:
        workers = counted(len(queue.live_workers), "worker uses", "workers use")
        return f" {workers} it now ({_names(queue)}): {consequence}."
    return " No worker uses it now."


def _names(queue: QueueState) -> str:
    return ", ".join(each.name for each in queue.live_workers)
