"""Delete a filter, so that everything is crawled again. It asks before it does.

PATH is a JOBDIR or a BLOOM_DIR. Only the filter's own files are deleted, not Scrapy's queue of a
paused job, and none while a crawl runs. In Redis, the queue that workers share is deleted with the
filter. Nobody can know whether other crawlers use a filter there; those that do go on with an empty
one.

With --queue, the queue in Redis is deleted, and the filter stays: what waited there is not crawled,
and the next crawl begins with the filter as it is.

Examples:
  scrapy bloom reset jobs/shop --yes
  scrapy bloom reset redis://localhost:6379/0 --key shop:bloom --queue --yes
  scrapy bloom reset redis://localhost:6379/0 --key shop:bloom --yes
"""

import argparse
import sys
from contextlib import closing
from pathlib import Path

from scrapy.exceptions import UsageError
from scrapy.settings import Settings

from scrapy_bloom.commands.shared.arguments import add_place, check_filter_name, is_redis
from scrapy_bloom.commands.shared.output import note, say
from scrapy_bloom.commands.shared.project import connect, load_project
from scrapy_bloom.commands.shared.queues import live_workers
from scrapy_bloom.exceptions import BloomError, StorageError
from scrapy_bloom.files import forgotten as forgotten_file
from scrapy_bloom.files.reader import filter_directory
from scrapy_bloom.job import paths as jobdir
from scrapy_bloom.job.locks import lock_directory
from scrapy_bloom.queues.members import keys_of_queue
from scrapy_bloom.queues.shared_state import QueueState, read_state, remove_queue
from scrapy_bloom.redis.keys.store import RedisStore
from scrapy_bloom.text import counted, size_text

SYNTAX = "PATH|REDIS-URL [--key NAME] [--spider NAME] [--queue] [--yes]"
HELP = "delete a filter, so that everything is crawled again"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's own."""
    add_place(parser)
    parser.add_argument(
        "--queue", action="store_true", help="in Redis: delete the shared queue, not the filter"
    )
    parser.add_argument("-y", "--yes", action="store_true", help="do not ask")


def run(options: argparse.Namespace, settings: Settings) -> None:
    """Delete a filter."""
    if is_redis(options.place):
        store = connect(options, load_project(settings, options.spider, options.place))
        with closing(store.server):
            _reset_in_redis(store, only_queue=options.queue, yes=options.yes)
    elif options.queue:
        raise UsageError("--queue is for a queue in Redis: give the URL of its server")
    else:
        check_filter_name(options, options.place)
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
        number = counted(len(files), "file")
        _confirm(f"Delete the filter in {directory}: {number}, {size}?", yes=yes)
        for file in [*reversed(files), *forgotten_file.files(directory)]:
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


def _reset_in_redis(store: RedisStore, *, only_queue: bool, yes: bool) -> None:
    server, key, name = store.server, store.key, f"{store.key} in {store.server.address}"
    queue, stored = read_state(server, key), store.read()
    if only_queue or stored.info is None:
        if queue is None and only_queue:
            raise StorageError(f"{server.address} has no queue {key!r}; nothing was deleted")
        if queue is not None:
            _confirm(f"Delete the queue {name}{_waiting(queue)}?{_users(queue)}", yes=yes)
            remove_queue(server, key)
            say(f"Deleted the queue {name}")
            return
        store.read_filter()  # says best that there is none
    count = sum(generation.count for generation in stored.generations)
    size = size_text(sum(generation.geometry.nbytes for generation in stored.generations))
    if queue is None:
        what, users = "", " Crawlers that use it now go on with an empty one."
    else:
        what, users = f", and its queue{_waiting(queue)}", _users(queue)
    _confirm(
        f"Delete the filter {name}: {counted(count, 'request')}, {size}{what}?{users}", yes=yes
    )
    store.reset(*keys_of_queue(key)[:-1])
    say(f"Deleted the filter {name}" + (" and its queue" if queue else ""))


def _waiting(queue: QueueState) -> str:
    return f", in which {counted(queue.waiting, 'request waits', 'requests wait')}"


def _users(queue: QueueState) -> str:
    if number := live_workers(queue):
        return (
            f" {number:,} worker{'s use' if number > 1 else ' uses'} it now, and will start over."
        )
    return " No worker uses it now."


def _confirm(question: str, *, yes: bool) -> None:
    if yes:
        return
    if not sys.stdin.isatty():
        raise BloomError(f"{question} Nobody can be asked here: add --yes to delete it")
    sys.stderr.write(f"{question} [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in {"y", "yes"}:
        raise BloomError("nothing was deleted")
