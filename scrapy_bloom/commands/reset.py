"""Delete a filter, so that everything is crawled again. It asks before it does.

PATH is a JOBDIR or a BLOOM_DIR. Only the filter's own files are deleted, not Scrapy's queue of a
paused job, and none while a crawl runs. In Redis, the queue that workers share is deleted with the
filter. Nobody can know whether other crawlers use a filter there; those that do go on with an empty
one.

With --dead, nothing is deleted: requests of a job that are dead, since they have killed its process
again and again, are crawled once more by its next run.

With --queue, the queue in Redis is deleted, and the filter stays: what waited there is not crawled,
and the next crawl begins with the filter as it is.

Neither is deleted while workers use the queue, unless --force is given. Then they start over with
an empty filter; with --queue, they end as if the crawl were finished.

Examples:
  scrapy bloom reset jobs/shop --yes
  scrapy bloom reset jobs/news --dead --yes
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
from scrapy_bloom.exceptions import BloomError, RefusedError, StorageError
from scrapy_bloom.files.directory import parts_beside
from scrapy_bloom.files.reader import draft_directory, filter_directory
from scrapy_bloom.job import paths as jobdir
from scrapy_bloom.job.locks import lock_directory, lock_job
from scrapy_bloom.queues.members import keys_of_queue
from scrapy_bloom.queues.shared_state import QueueState, read_state, remove_queue
from scrapy_bloom.queues.sqlite import read_dead, requeue_dead
from scrapy_bloom.redis.keys.store import RedisStore
from scrapy_bloom.text import counted, escaped, size_text

SYNTAX = "PATH|REDIS-URL [--key NAME] [--spider NAME] [--dead] [--queue] [--force] [--yes]"
HELP = "delete a filter, so that everything is crawled again"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's own."""
    add_place(parser)
    parser.add_argument(
        "--dead", action="store_true", help="of a job: crawl its dead requests again, no more"
    )
    parser.add_argument(
        "--queue", action="store_true", help="in Redis: delete the shared queue, not the filter"
    )
    parser.add_argument(
        "--force", action="store_true", help="in Redis: also while workers use the queue"
    )
    parser.add_argument("-y", "--yes", action="store_true", help="do not ask")


def run(options: argparse.Namespace, settings: Settings) -> None:
    """Delete a filter."""
    if options.dead:
        _requeue_dead(options)
    elif is_redis(options.place):
        store = connect(options, load_project(settings, options.spider, options.place))
        with closing(store.server):
            _reset_in_redis(store, options)
    elif options.queue or options.force:
        option = "--queue" if options.queue else "--force"
        raise UsageError(f"{option} is for a queue in Redis: give the URL of its server")
    else:
        check_filter_name(options, options.place)
        _reset_files(Path(options.place), yes=options.yes)


def _requeue_dead(options: argparse.Namespace) -> None:
    if is_redis(options.place) or options.queue or options.force:
        raise UsageError("--dead is for the queue of a job: give its JOBDIR, and no other option")
    job_dir = Path(options.place)
    database = job_dir / jobdir.DATABASE
    if not jobdir.is_database(database):
        raise StorageError(f"{job_dir} holds no queue of CrashSafeScheduler; give its JOBDIR")
    lock = lock_job(job_dir.absolute())
    try:
        if number := len(read_dead(database)):
            dead = counted(number, "dead request")
            question = f"Have {dead} of {job_dir} crawled again?"
            _confirm(question, yes=options.yes, done="changed", do="do it")
            requeue_dead(database)
    finally:
        lock.release()
    say(f"{counted(number, 'dead request')} of {job_dir} will be crawled again")


def _reset_files(path: Path, *, yes: bool) -> None:
    directory = filter_directory(path)
    drafts = draft_directory(directory)
    if path.is_file() or not (jobdir.filter_files(directory) or drafts.exists()):
        raise StorageError(f"{path} holds no filter; give a JOBDIR or a BLOOM_DIR")
    lock = lock_directory(directory)
    try:
        # What is in them does not matter: a damaged one is a reason to be here.
        files = [*jobdir.filter_files(directory), *drafts.glob("*")]
        size = size_text(sum(file.stat().st_size for file in files))
        number = counted(len(files), "file")
        _confirm(f"Delete the filter in {directory}: {number}, {size}?", yes=yes)
        for file in [*reversed(files), *parts_beside(directory)]:
            file.unlink()
        if drafts.exists():
            drafts.rmdir()
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


def _reset_in_redis(store: RedisStore, options: argparse.Namespace) -> None:
    name = f"{store.key} in {store.server.address}"
    try:
        queue = _queue(store, options)
    except RefusedError as error:
        if not (options.queue and options.force):
            raise
        _confirm(f"Delete the queue {name} unread? {error}.", yes=options.yes)
        remove_queue(store.server, store.key)
        say(f"Deleted the queue {name}")
        return
    stored = store.read()
    if options.queue or (stored.info is None and queue is not None):
        if queue is None:
            raise StorageError(
                f"{store.server.address} has no queue {store.key!r}; nothing was deleted"
            )
        users = _users(queue, "they end as if the crawl were finished, and those are not crawled")
        _confirm(f"Delete the queue {name}{_waiting(queue)}?{users}", yes=options.yes)
        _queue(store, options)  # a worker may have come before the answer
        remove_queue(store.server, store.key)
        say(f"Deleted the queue {name}")
        return
    if stored.info is None and not stored.left_over and not stored.drafts:
        store.read_filter()  # says best that there is none
    count = sum(generation.count for generation in stored.generations)
    size = size_text(sum(generation.geometry.nbytes for generation in stored.generations))
    if stored.info is None:
        what, users = f"what is left of the filter {name}", ""
    elif queue is None:
        what = f"the filter {name}: {counted(count, 'request')}, {size}"
        users = " Crawlers that use it now go on with an empty one."
    else:
        what = f"the filter {name}: {counted(count, 'request')}, {size}, and its queue"
        what += _waiting(queue)
        users = _users(queue, "they start over with an empty filter")
    _confirm(f"Delete {what}?{users}", yes=options.yes)
    _queue(store, options)
    store.reset(*keys_of_queue(store.key)[:-1])
    say(f"Deleted the filter {name}" + (" and its queue" if queue else ""))


def _queue(store: RedisStore, options: argparse.Namespace) -> QueueState | None:
    """Return how the queue stands, if there is one; without --force, no worker may use it."""
    queue = read_state(store.server, store.key)
    if (number := live_workers(queue)) and not options.force:
        raise StorageError(
            f"{number:,} worker{'s use' if number > 1 else ' uses'} the queue {store.key!r} in "
            f"{store.server.address} now: {_names(queue)}; nothing was deleted. Stop them, and try "
            "again (one that was killed counts until its lease is over, BLOOM_QUEUE_LEASE_SECS); "
            "or add --force"
        )
    return queue


def _waiting(queue: QueueState) -> str:
    return f", in which {counted(queue.waiting, 'request waits', 'requests wait')}"


def _users(queue: QueueState, fate: str) -> str:
    if number := live_workers(queue):
        use = "s use" if number > 1 else " uses"
        return f" {number:,} worker{use} it now ({_names(queue)}): {fate}."
    return " No worker uses it now."


def _names(queue: QueueState | None) -> str:
    return ", ".join(each.name for each in queue.workers if each.is_alive) if queue else ""


def _confirm(question: str, *, yes: bool, done: str = "deleted", do: str = "delete it") -> None:
    if yes:
        return
    if not sys.stdin.isatty():
        raise BloomError(f"{question} Nobody can be asked here: add --yes to {do}")
    sys.stderr.write(f"{escaped(question)} [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in {"y", "yes"}:
        raise BloomError(f"nothing was {done}")
