"""The keys of a filter and its queue in Redis or Valkey, and what they hold.

All keys of a filter `<key>` are in one slot of a Cluster. Its hash is `<key>`. The queue has three
more hashes, `{<key>}:rows`, `runs` and `workers`, and the sorted sets listed below. In addition,
there are

    {<key>}:blocks:<id>:<c>   the blocks of a generation, 15 per key, in the format of files
    {<key>}:blocks:<id>:made  a bitmap: 1 for each of these keys that was made, and for the one
                              after them, so that a lost key is noticed, and a lost bitmap

The fields of the filter's hash (times are in ms since 1970, by the server's clock):

    id, version               random; each change of the generations changes the version
    filter                    JSON: format, hash scheme, fingerprinter, spider, error rate
    sample                    a sample of the first requests, with their fingerprints
    gen:<n>                   JSON: generation n: id, geometry, capacity, error rate, times
    count:<n>                 how many requests are recorded in generation n
    unlink:<id>               of an expired generation, until a crawl has removed its keys
    copying                   1 until `scrapy bloom copy` has written all keys
    pushed, done              how many requests have entered the queue, and have left it
    numbered                  the last number that was given to a row as its id or position
    crawl                     name of the spider whose queue it is
    run, run_name             id and name of the current run; no fields until a crawl has joined
    began                     when it began; without a name, also when a worker begins an epoch
    epoch                     raised when rows that have failed or wait are to be tried again
    adds_tries                1 if what is tried again in this epoch has one try more, else 0
    tried_at                  when adds_tries was set last without a run's name
    start                     the worker that runs the spider's start(); "done" when it has ended
    start_at                  the value of `numbered` then: older start requests may be replaced
    ended                     when the queue became empty
    look                      when to check for expired leases next
    members                   ids of the workers that ask for requests (16 each), in turn

A value in the hash `runs` has, separated by spaces: when the run began; `pushed`, `done`, and the
numbers of failed and dead requests then; and `ended`, or 0.

The hash `rows` has the rows, as lists in msgpack. The id of a row has 8 bytes: the number with
which it entered. Its values, in this order:

    state                     w (waiting), f (failed), d (dead), p (others: its set tells)
    tries                     in how many runs it has failed
    epoch                     of a failed or waiting row, else 0
    position                  the number with which it entered, or entered again
    flags                     letters of `FLAGS`
    order                     slot, NUL, priority (8 bytes), rank (1)
    page                      its fingerprint; empty: it has none
    waits_for                 of a waiting row: the page
    reason                    of a failed or dead row
    hops                      the pages to which it was redirected, a list
    died                      the ids of the workers that died with it (16 bytes each)
    records                   a list: bits to be recorded if a waiting row ends; or what it replaced
    first                     the request as it first entered, if it has changed: order, 1 if the
                              newest comes first (1), its data
    data                      the serialized request

The sorted sets have scores 0, so they are in the order of their members:

    pending                   rows that can be taken, in the order of taking: hash of the slot (the
                              first 4 of its SHA-1), slot, NUL, priority (8), rank (1), position
                              (8), id
    suspects                  rows that were in flight in three workers that died: likewise
    leased                    rows in flight: worker (16), token (8), id
    kept                      failed and waiting rows: whether start() yielded it (1), epoch (4), id
    waiting                   waiting rows: length of the page (4), page, epoch (4), id
    dead                      rows that have failed in five runs, or died alone: id
    unreadable                rows that no worker of this run can deserialize: id
    open                      rows by their own page, if they were taken or are new once in each
                              run, and by their hops: length of the page (4), page, id
    worklist                  pages that are done, while rows still wait for them

The bits of a fingerprint are those that hash scheme 1 returns (`filters.hashing`): the block hash
(6), and positions in the block (2 each), at least as many as the generation with the most hashes
needs. The fields of `workers`:

    <worker>                  when its lease expires; without it, its requests belong to nobody
    <worker>:number           number of its last batch; "gone", that number and a time, for an hour
                              after the worker has lost its lease, or has rejoined
    <worker>:answers          of that batch: 1 or 0 for each request that entered, whether it was
                              queued; a space; how many fingerprints were recorded
    <worker>:asked            when it has asked for requests last
    <worker>:name             host:pid, for `info`
    <worker>:lease            how long its lease lasts, in ms, for `info`
    <worker>:done             how many requests it has finished, for `info`
    <worker>:suspect          token of the suspect that is leased to it
    <worker>:stop             set by `scrapy bloom stop`
    <worker>:back             set when it has rejoined: then its requests have not killed it
    <worker>:dead             id of the dead row that its death has made

Numbers are big-endian. A priority is stored as 2^63 - 1 - priority, a rank as rank + 128. In a
member, a position is n, or 2^53 - n where the newest comes first. A token is the number of the
batch in which a request was taken (6 bytes), and its index in the batch (2).
A script that fails half-way keeps what it has written. So `pushed` is raised after a row was added,
and `done` before a row is removed.
"""

from collections.abc import Mapping
from typing import Any

# Blocks of 8 KiB per key. With its header, a key takes 128 KiB, a size class of the server's
# allocator (jemalloc); with 16 blocks, it would take the next one, 160 KiB.
CHUNK_BLOCKS = 15

# The keys that each script gets, in this order: the filter's, and `{<key>}:<name>` of the others.
KEYS = (
    *("filter", "rows", "pending", "leased", "suspects", "kept", "waiting", "dead", "unreadable"),
    *("open", "worklist", "runs", "workers"),
)

# The flags of a row, and of a request that enters: each is a letter.
_NAMES = "is_filtered", "is_start", "once", "newest_first", "was_taken", "is_recorded", "passes"
FLAGS: Mapping[str, str] = dict(zip(_NAMES, "fsontrp", strict=True))


def flags_of(request: Any) -> str:
    """Return the letters of a row, or of a request that enters."""
    return "".join(letter for name, letter in FLAGS.items() if getattr(request, name, False))


def is_field_of_queue(name: bytes) -> bool:
    """Return whether a field of the filter's hash belongs to its queue."""
    return b":" not in name and name not in (b"id", b"version", b"filter", b"sample", b"copying")


def named_keys(key: str) -> dict[str, str]:
    """Return the keys of a filter and its queue, without blocks, by their names in scripts."""
    return {name: f"{{{key}}}:{name}" if name != "filter" else key for name in KEYS}


def keys_of(key: str) -> list[str]:
    """Return the keys of a filter and its queue in the order of the scripts, without blocks."""
    return list(named_keys(key).values())


def block_key(key: str, generation_id: str, chunk: int) -> str:
    """Return the name of a key of blocks."""
    return f"{blocks_prefix(key, generation_id)}{chunk}"


def bitmap_key(key: str, generation_id: str) -> str:
    """Return the name of the bitmap of the keys of a generation."""
    return f"{blocks_prefix(key, generation_id)}made"


def blocks_prefix(key: str, generation_id: str) -> str:
    """Return the beginning of the names of the keys of blocks of a generation."""
    return f"{{{key}}}:blocks:{generation_id}:"
