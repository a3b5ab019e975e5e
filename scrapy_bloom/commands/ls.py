"""List the filters and queues of a Redis server, and the keys that no crawl uses any more.

The command scans the names of all keys, so it takes a while on a large server. It neither reads
nor changes keys of other programs. --gc removes the left-over keys, after a question.

Examples:
  scrapy bloom ls redis://localhost:6379/0
  scrapy bloom ls redis://localhost:6379/0 --json
  scrapy bloom ls redis://localhost:6379/0 --gc
"""

import argparse
import re
import struct
from collections.abc import Sequence
from contextlib import closing, suppress

from scrapy.exceptions import UsageError
from scrapy.settings import Settings

from scrapy_bloom.commands.shared.arguments import add_json, add_server, add_yes
from scrapy_bloom.commands.shared.figures import filter_figures, queue_figures
from scrapy_bloom.commands.shared.output import confirm, print_json, print_table, say
from scrapy_bloom.commands.shared.places import Figures, RedisPlace
from scrapy_bloom.commands.shared.project import answering_server, load_project
from scrapy_bloom.exceptions import RefusedError, StorageError
from scrapy_bloom.filters.sizing import BLOCK_BYTES
from scrapy_bloom.queues.redis_store import Member
from scrapy_bloom.redis.connection.server import RedisServer
from scrapy_bloom.redis.layout import keys_of
from scrapy_bloom.redis.scripts import CHUNK_BLOCKS, TOKEN_BYTES, WORKER_BYTES
from scrapy_bloom.redis.stored import ID
from scrapy_bloom.text import counted, number_text, rough_duration_text, size_text

_SCANNED = 1000  # keys at once
_SETS = [name.rpartition(":")[2] for name in keys_of("")[1:]]
# The name of a key of blocks, or of a queue.
_NAME = re.compile(
    rf"\{{(?P<tag>[^{{}}]+)\}}:(?:blocks:(?P<id>[0-9a-f]{{16}}):\d+|(?:{'|'.join(_SETS)}))"
)

_BLOCKS, _QUEUE = "blocks of no generation", "queue without a filter"

# The hash of a filter, then keys of its queue. Removes the queue unless there is a filter again.
_REMOVE_SETS = """
if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
return redis.call('UNLINK', unpack(KEYS, 2))
"""

_COLUMNS = (
    ("filter:", "key", str),
    ("recorded", "recorded", lambda number: "damaged" if number is None else number_text(number)),
    ("size", "bytes", lambda size: "-" if size is None else size_text(size)),
    ("pending", "pending", lambda number: "-" if number is None else f"{number:,}"),
    ("in flight", "in_flight", lambda number: "-" if number is None else f"{number:,}"),
    ("workers", "workers", lambda number: "-" if number is None else f"{number:,}"),
    ("unused for", "idle_secs", lambda secs: "-" if secs is None else rough_duration_text(secs)),
)
_LEFT_COLUMNS = (
    ("left over:", "what", str),
    ("of:", "key", str),
    ("keys", "keys", lambda keys: f"{len(keys):,}"),
    ("size", "bytes", size_text),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the subcommand."""
    add_server(parser)
    parser.set_defaults(spider=None)
    parser.add_argument("--gc", action="store_true", help="remove the left-over keys")
    add_yes(parser)
    add_json(parser)


def run(options: argparse.Namespace, settings: Settings) -> None:
    """List the filters and queues of a server; with --gc, remove left-over keys."""
    if options.place.url is None:
        raise UsageError(
            "no server is given; give its URL: the filter of this project is in files "
            f"({options.place.name})"
        )
    with closing(answering_server(load_project(settings, None, options.place.url))) as server:
        filters, left_over = _listed(server)
        if options.json:
            shown = [{**each, "keys": len(each["keys"])} for each in left_over]
            print_json({"server": server.address, "filters": filters, "left_over": shown})
        else:
            _print(server, filters, left_over, gc=options.gc)
        if options.gc and left_over:
            _remove(server, left_over, options)


def _print(
    server: RedisServer, filters: list[Figures], left_over: list[Figures], *, gc: bool
) -> None:
    say(f"{server.address} has {counted(len(filters), 'filter')}")
    for columns, rows in ((_COLUMNS, filters), (_LEFT_COLUMNS, left_over)):
        if rows:
            say("")
            print_table(columns, rows)
    if left_over and not gc:
        say("")
        say("No crawl uses the left-over keys: --gc removes them")


def _remove(server: RedisServer, left_over: list[Figures], options: argparse.Namespace) -> None:
    keys = sum(len(each["keys"]) for each in left_over)
    size = size_text(sum(each["bytes"] for each in left_over))
    question = f"Remove {counted(keys, 'key')} ({size}) that no crawl uses?"
    confirm(question, options)
    agreed = {name for each in left_over for name in each["keys"]}
    removed = 0
    for each in _listed(server)[1]:  # again, because a crawl may use some since the question
        names = [name for name in each["keys"] if name in agreed]
        if names and each["what"] == _QUEUE:
            removed += server.script(_REMOVE_SETS, [each["key"], *names])
        elif names:
            server.batches([("UNLINK", name) for name in names])
            removed += len(names)
    if not options.json:
        say(f"Removed {counted(removed, 'key')}")


def _listed(server: RedisServer) -> tuple[list[Figures], list[Figures]]:
    """Return the figures of the filters of a server, and those of its left-over keys."""
    names = _permanent_names(server)
    tags = sorted({match["tag"] for match in names.values()})
    idle = {key: _idle_secs(server, key) for key in tags}  # before they are read
    # Read after the keys were listed, so that they mention a generation made meanwhile.
    mentioned = {key: _ids_in(server, key) for key in tags}
    found: dict[tuple[str, str], list[str]] = {}
    for name, match in names.items():
        key, generation_id = match["tag"], match["id"]
        if generation_id and generation_id not in mentioned[key]:
            found.setdefault((_BLOCKS, key), []).append(name)
        elif not generation_id and not mentioned[key]:
            found.setdefault((_QUEUE, key), []).append(name)
    left_over = [
        _left_over(server, what, key, keys)
        for (what, key), keys in sorted(found.items())
        if (_are_blocks(server, keys) if what == _BLOCKS else _are_sets(server, key, keys))
    ]
    return [_figures(server, key, idle[key]) for key in tags if mentioned[key]], left_over


def _permanent_names(server: RedisServer) -> dict[str, re.Match[str]]:
    """Return the names of all keys that may belong to scrapy_bloom and do not expire."""
    found = server.call(
        lambda client: {
            name for name in client.scan_iter(match="{*}*", count=_SCANNED) if _match(name)
        }
    )
    names = sorted(found)
    ages = server.batches([("PTTL", name) for name in names])
    kept = [name for name, ttl in zip(names, ages, strict=True) if ttl == -1]
    return {name.decode(): match for name in kept if (match := _match(name))}


def _match(name: bytes) -> re.Match[str] | None:
    try:
        return _NAME.fullmatch(name.decode())
    except UnicodeDecodeError:
        return None


def _ids_in(server: RedisServer, key: str) -> set[str]:
    """Return all ids that the hash of a filter mentions; none if the key is not a filter."""
    try:
        fields = server.send("HGETALL", key)
    except RefusedError:  # the key is not a hash
        return set()
    return {each.decode() for pair in fields.items() for text in pair for each in ID.findall(text)}


def _are_blocks(server: RedisServer, names: Sequence[str]) -> bool:
    try:
        sizes = server.batches([("STRLEN", name) for name in names])
    except RefusedError:  # the keys are not strings
        return False
    return all(0 < size <= CHUNK_BLOCKS * BLOCK_BYTES and not size % BLOCK_BYTES for size in sizes)


def _are_sets(server: RedisServer, key: str, names: Sequence[str]) -> bool:
    """Return whether keys without a filter have the contents of a queue of scrapy_bloom."""
    is_ours = False
    for name in names:
        kind = name.rpartition(":")[2]
        try:
            if kind == "workers":
                is_ours |= all(ID.match(field) for field in server.send("HKEYS", name))
                continue
            first = server.send("ZRANGE", name, 0, 0)[0]
            if kind != "downloading":  # other programs may have such members
                Member.parsed(first[WORKER_BYTES + TOKEN_BYTES if kind == "leased" else 0 :])
                is_ours = True
        except (RefusedError, IndexError, ValueError, struct.error):
            return False
    return is_ours and not server.send("EXISTS", key)


def _left_over(server: RedisServer, what: str, key: str, names: list[str]) -> Figures:
    try:
        sizes = server.batches([("MEMORY", "USAGE", name) for name in names])
    except RefusedError:  # an ACL need not allow it
        sizes = []
    return {"what": what, "key": key, "keys": names, "bytes": sum(size or 0 for size in sizes)}


def _idle_secs(server: RedisServer, key: str) -> int | None:
    """Return the seconds since a key was last used; None if the server does not say."""
    try:
        idle: int | None = server.send("OBJECT", "IDLETIME", key)
    except RefusedError:  # its maxmemory-policy is a LFU one, or an ACL does not allow it
        return None
    return idle


def _figures(server: RedisServer, key: str, idle_secs: int | None) -> Figures:
    figures: Figures = dict.fromkeys(
        ("spider", "recorded", "bytes", "pending", "in_flight", "workers", "created")
    )
    with suppress(StorageError):  # damaged, not complete yet, or removed meanwhile
        place = RedisPlace.on(server, key)
        known = filter_figures(place.filter())
        figures |= {name: known[name] for name in ("spider", "recorded", "bytes")}
        figures["created"] = min(each["created"] for each in known["generations"])
        if queue := queue_figures(place):
            figures |= {name: queue[name] for name in ("pending", "in_flight")}
            figures["workers"] = sum(each["is_alive"] for each in queue["workers"])
    return {"key": key, **figures, "idle_secs": idle_secs}
