"""List the filters and queues of a Redis server, and the keys that no crawl uses any more.

The command scans the names of all keys, so it takes a while on a large server. --gc removes the
left-over keys, after a question. A key is left over only if its contents are those of a crawl.

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
from functools import partial

from scrapy.exceptions import UsageError
from scrapy.settings import Settings

from scrapy_bloom.commands.shared.arguments import add_json, add_server, add_yes
from scrapy_bloom.commands.shared.figures import filter_figures, queue_figures
from scrapy_bloom.commands.shared.output import confirm, print_json, print_table, say
from scrapy_bloom.commands.shared.places import Figures, RedisPlace
from scrapy_bloom.commands.shared.project import answering_server, load_project
from scrapy_bloom.exceptions import RefusedError, StorageError
from scrapy_bloom.filters.sizing import BLOCK_BYTES
from scrapy_bloom.queues.redis_store import SETS, parsed_request
from scrapy_bloom.redis.connection.server import RedisServer
from scrapy_bloom.redis.layout import keys_of
from scrapy_bloom.redis.scripts import CHUNK_BLOCKS
from scrapy_bloom.redis.stored import ID
from scrapy_bloom.text import counted, number_text, size_text

_SCANNED = 1000  # keys at once
_SETS = [name.rpartition(":")[2] for name in keys_of("")[1:]]
# The name of a key of blocks, or of a queue.
_NAME = re.compile(
    rf"\{{(?P<tag>[^{{}}]+)\}}:"
    rf"(?:blocks:(?P<id>[0-9a-f]{{16}}):(?:0|[1-9][0-9]{{0,6}})|{'|'.join(_SETS)})"
)
_CHECKED = 100  # members of a key that are checked
# The contents of the hashes of a queue: fields, each followed by NUL and its value.
_HASHES = {
    "workers": re.compile(
        rb"[0-9a-f]{16}((:lease|:done)?\0[0-9]{1,18}|:number\0(gone )?[0-9]{1,18}( [0-9]{1,18})?|"
        rb":(name|suspect|stop|back|dead)\0.*)",
        re.DOTALL,
    ),
    "runs": re.compile(rb".*\0[0-9a-f]{16}", re.DOTALL),
    "targets": re.compile(rb".+\0[uf]", re.DOTALL),
}
_PICKLE = re.compile(rb"\x80[\x02-\x05].*\.", re.DOTALL)  # a serialized request
# A member of downloading.
_DOWNLOADING = re.compile(rb"[^\0]*\0[0-9a-f]{16}(.{8}|\xff.{11})", re.DOTALL)

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
    if options.place.key:
        raise UsageError(f"ls lists all filters of a server; leave #{options.place.key} out")
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
    return [_figures(server, key) for key in tags if mentioned[key]], left_over


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
    """Return whether keys without a filter have the contents of a queue of scrapy_bloom.

    Each key must have them, and one of them must have requests or workers.
    """
    kinds = [name.rpartition(":")[2] for name in names]
    if server.send("EXISTS", key) or {"runs", "targets", "downloading"}.issuperset(kinds):
        return False
    try:
        return all(map(partial(_is_set, server), names, kinds))
    except (RefusedError, ValueError, struct.error):
        return False


def _is_set(server: RedisServer, name: str, kind: str) -> bool:
    if pattern := _HASHES.get(kind):
        _, found = server.send("HSCAN", name, 0, "COUNT", _CHECKED)
        lines = [b"%b\0%b" % field for field in found.items()]
        has_number = kind != "workers" or any(b":number\0" in line for line in lines)
        return has_number and all(pattern.fullmatch(line) for line in lines)
    number, members = server.batches([("ZCARD", name), ("ZRANGE", name, 0, _CHECKED - 1)])
    if server.send("ZCOUNT", name, 0, 0) != number:
        return False
    if kind == "downloading":
        return all(_DOWNLOADING.fullmatch(member) for member in members)
    if kind == "leased" and not all(ID.match(member) for member in members):
        return False
    (state,) = (state for state, some in SETS.items() if kind in some)
    requests = [parsed_request(kind, state, member) for member in members]
    return all(_PICKLE.fullmatch(each.data) and each.position <= 2**53 for each in requests)


def _left_over(server: RedisServer, what: str, key: str, names: list[str]) -> Figures:
    try:
        sizes = server.batches([("MEMORY", "USAGE", name) for name in names])
    except RefusedError:  # an ACL need not allow it
        sizes = []
    return {"what": what, "key": key, "keys": names, "bytes": sum(size or 0 for size in sizes)}


def _figures(server: RedisServer, key: str) -> Figures:
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
    return {"key": key, **figures}
