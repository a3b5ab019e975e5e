"""Create, change and remove filters in Redis.

The script that removes a generation adds a field to the filter's hash, which tells that its keys
are left to be removed. Any crawl that reads such a field does it.
"""

from collections.abc import Mapping, Sequence

from scrapy_bloom.exceptions import RefusedError
from scrapy_bloom.redis.connection.server import RedisServer
from scrapy_bloom.redis.layout import KEYS, bitmap_key, block_key, keys_of
from scrapy_bloom.redis.lua_scripts import packed, script
from scrapy_bloom.redis.stored import RedisGeneration, made_keys, read_stored


def change(
    server: RedisServer,
    key: str,
    known: tuple[str, str],
    fields: Mapping[str, str],
    *,
    next_version: str,
    removed: Sequence[str] = (),
    added: Sequence[RedisGeneration] = (),
    sizes: Mapping[str, tuple[str, int]] | None = None,
) -> str:
    """Create a filter, or change fields of its hash, in one step.

    Args:
        server: the connection.
        key: the name of the filter's hash.
        known: the id and the version of the filter; both are empty if there must be none.
        fields: what is set, by the names of the fields.
        next_version: the new version of the filter; random.
        removed: names of fields that are removed.
        added: generations that are among the fields.
        sizes: for each further key of a complete copy, the command that counts what it has, and
            how many it must have.

    Returns:
        "ok"; "other" if another filter is there, or none; "version" if another crawl has changed
        the filter; "lost" if a size differs.

    Raises:
        RefusedError: there is no filter, and a key of its queue has a value of another program.
    """
    bitmaps = [bitmap_key(key, each.id) for each in added]
    values = {
        "id": known[0],
        "version": known[1],
        "next_version": next_version,
        "num_queue": len(KEYS),
        "fields": [word for field in fields.items() for word in field],
        "removed": removed,
        "num_keys": [each.num_chunks for each in added],
        "sizes": list(sizes.values()) if sizes else [],
    }
    keys = [key, *sizes] if sizes else [*keys_of(key), *bitmaps]
    answer = server.script(script("change"), keys, packed(values))
    if answer == b"foreign":
        raise RefusedError(
            f"{server.address} has no filter {key!r}, but a key that begins with {{{key}}} has a "
            "value of another program, which was left as it is: set BLOOM_REDIS_KEY to another name"
        )
    return str(answer.decode())


def remove_filter(server: RedisServer, key: str, filter_id: str) -> None:
    """Remove a filter and its queue, for all crawlers, unless it was replaced.

    Args:
        server: the connection.
        key: the name of the filter's hash.
        filter_id: the id of the filter; another filter is kept.
    """
    stored = read_stored(server, key, may_be_copied=True)  # others may have changed the generations
    if stored is None:
        return
    if server.script(script("remove"), keys_of(key), filter_id) == b"ok":
        remove_blocks(server, key, [*stored.unlinked, *(each.id for each in stored.generations)])


def remove_blocks(server: RedisServer, key: str, generation_ids: Sequence[str]) -> None:
    """Remove the keys of generations that are no longer in the filter's hash.

    The function is idempotent, and several crawls may call it at the same time.
    """
    for each in generation_ids:
        bitmap = bitmap_key(key, each)
        made = made_keys(server.send("GET", bitmap) or b"")
        server.batches([("UNLINK", block_key(key, each, chunk)) for chunk in made])
        server.send("UNLINK", bitmap)
