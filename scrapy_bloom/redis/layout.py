"""The keys of a filter and its queue in Redis, and the arguments and replies of their scripts.

These tables are the only place of positions: Python and Lua code is made from them, and a test
compares them with the documentation.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

# The keys that each script gets, in this order, by their names in Lua. The first one is the name of
# the filter, the others are `{<key>}:<name>`.
KEYS: Mapping[str, str] = {
    "filter": "a hash: the figures of the filter and of the queue",
    "rows": "a hash: the rows, by their ids",
    "pending": "rows that can be taken",
    "leased": "rows in flight",
    "suspects": "rows that were in flight in three workers that died",
    "kept": "failed and waiting rows",
    "last_tries": "those of kept that the next try makes dead",
    "waiting": "waiting rows, by the page for which they wait",
    "dead": "rows that have failed in five runs, and suspects whose worker died, too",
    "unreadable": "rows that no worker of this run can deserialize",
    "open": "rows by page: their own page, if they may be open or are kept, and their hops",
    "worklist": "pages that are done, while rows still wait for them",
    "runs": "a hash: the ids of earlier runs, by their names",
    "workers": "a hash: the workers",
    "downloading": "requests that are not downloaded yet, if their slots have limits",
}

# Each row is in one of these sets, so that a lost key is noticed.
SETS = ("pending", "leased", "suspects", "kept", "dead", "unreadable")

# The fields of the filter's hash that belong to the queue.
QUEUE_FIELDS = (
    *(
        "pushed",
        "done",
        "numbered",
        "start",
        "start_at",
        "crawl",
        "run",
        "run_name",
        "began",
    ),
    *("kept", "epoch", "tried_at", "adds_tries", "ended", "last", "look", "crew"),
)

# The flags of a row, and of a request that enters: each is a letter.
FLAGS: Mapping[str, str] = {
    "is_filtered": "f",
    "is_start": "s",
    "once": "o",
    "newest_first": "n",
    "was_taken": "t",
}
ENTERED_FLAGS: Mapping[str, str] = {"is_recorded": "r", "passes": "p"}


class Field(NamedTuple):
    """An argument of a script.

    Attributes:
        name: its name in Python and Lua.
        kind: "text"; "number"; "flag", which is 1 or 0; "texts", a number and so many texts;
            "rows", a number and so many rows of other fields.
        about: what it is.
        rows: the fields of a row.
    """

    name: str
    kind: str
    about: str
    rows: Sequence["Field"] = ()


GENERATIONS = Field(
    "generations",
    "rows",
    "the generations, oldest first",
    (
        Field("prefix", "text", "the beginning of the names of its keys"),
        Field("num_blocks", "number", "how many blocks it has"),
        Field("num_hashes", "number", "how many bits a fingerprint has"),
    ),
)
_RECORDS = Field(
    "records",
    "texts",
    "bits to be recorded if the row is done: of each of its pages, and of that page in this run if "
    "it is new once in each run, else an empty text",
)

# Arguments of the script that applies a batch.
BATCH = (
    Field("id", "text", "the id of the filter"),
    Field("run", "text", "the id of the run"),
    Field("version", "text", "the version of the generations"),
    Field("worker", "text", "the id of the worker"),
    Field("number", "number", "the number of the batch"),
    Field("lease", "number", "the duration of the lease in ms"),
    Field("count_field", "text", "the field of the newest generation's count"),
    GENERATIONS,
    Field("lasting", "number", "the place of the first generation that lasts as long as the run"),
    Field("keeps_failed", "flag", "whether failed and waiting rows are kept"),
    Field(
        "entered",
        "rows",
        "requests that enter the queue",
        (
            Field("flags", "text", "its flags"),
            Field("order", "text", "slot, priority and rank"),
            Field("data", "text", "the serialized request"),
            Field("fingerprint", "text", "its fingerprint; empty: it has none"),
            Field("bits", "text", "the bits of its fingerprint"),
            Field("once", "text", "those of its fingerprint in this run, if it has the flag once"),
            Field("replaces", "text", "the member of leased that it replaces, or empty"),
            _RECORDS,
        ),
    ),
    Field("recorded", "texts", "bits of fingerprints that are recorded without a request"),
    Field(
        "ended",
        "rows",
        "requests that have ended",
        (
            Field("entry", "text", "its member of leased"),
            Field("how", "text", "done, taken over, failed or unreadable"),
            Field("reason", "text", "of a failed request: why"),
            Field("awaits", "texts", "pages on whose ends it depends"),
            Field("pages", "texts", "its page and hops; of one that was taken over, its page"),
            _RECORDS,
        ),
    ),
    Field(
        "downloaded",
        "rows",
        "requests that are downloaded",
        (
            Field("entry", "text", "its member of leased"),
            Field("slot", "text", "its slot"),
            Field("pause", "number", "for how many ms no other worker may take from the slot"),
        ),
    ),
    Field("want", "number", "how many requests to take"),
    Field("by_slot", "flag", "whether to take them round-robin by slot"),
    Field(
        "downloads",
        "rows",
        "downloads of this worker",
        (Field("slot", "text", "the slot"), Field("number", "number", "how many")),
    ),
    Field("limit", "number", "downloads of a slot at a time; 0: any number"),
    Field("has_delay", "flag", "whether there is a delay between downloads of a slot"),
    Field(
        "limits",
        "rows",
        "limits of single slots",
        (
            Field("slot", "text", "the slot"),
            Field("limit", "number", "its downloads at a time; 0: any number"),
            Field("has_delay", "flag", "whether it has a delay"),
        ),
    ),
    Field("stands_still", "flag", "whether a suspect may be in flight next to others"),
    Field("may_start", "flag", "whether this worker can run start()"),
    Field("start_ended", "flag", "whether start() has ended in this worker"),
    Field("is_over", "flag", "whether this worker has found that the crawl has ended"),
)

# What that script returns, after "ok".
BATCH_REPLY = (
    Field("queued", "text", "1 or 0 for each request that entered"),
    Field("added", "number", "how many fingerprints were recorded"),
    Field(
        "places",
        "text",
        "for each fingerprint that entered, that of its run after it, and each recorded one: the "
        'place of a generation that has it now, as a character; "n": none; empty if a reply was '
        "lost",
    ),
    Field("count", "number", "how many requests are recorded in the newest generation"),
    Field("taken", "texts", "for each request that this batch has taken: member of leased, row"),
    Field("start", "text", 'the worker that runs start(), or "done"'),
    Field("left", "number", "rows that are not at rest, and pages of the worklist"),
    Field("pending", "number", "requests pending"),
    Field("pushed", "number", "how many requests have entered the queue"),
    Field("done", "number", "how many requests have left it"),
    Field("ended", "text", "when the queue became empty, in ms; empty: it is not"),
    Field("died", "texts", "requests that this batch has made dead, because workers died"),
    Field("given_up", "number", "how many requests this batch has made dead after five tries"),
    Field("circles", "texts", "requests that wait for a row that waits for them"),
    Field("expired", "texts", "name and number of requests of workers whose leases have expired"),
    Field("is_stopped", "flag", "whether this worker is asked to end"),
)

JOIN = (
    Field("id", "text", "the id of the filter"),
    Field("worker", "text", "the id of the worker"),
    Field("name", "text", "host:pid"),
    Field("spider", "text", "the name of the spider"),
    Field("lease", "number", "the duration of the lease in ms"),
    Field("former", "text", "the former id of the worker, if it joins again"),
    Field("newest", "number", "the number of the newest generation"),
    Field("run", "text", "the id of the run, if this worker begins it"),
    Field("run_name", "text", "the name of the run"),
    Field("began", "text", "when that run began, in ms, if the worker joins again"),
    Field("is_crawl", "flag", "whether this worker may begin a run"),
)

JOIN_REPLY = (
    Field("run", "text", "the id of the current run"),
    Field("run_name", "text", "its name"),
    Field("began", "text", "when it began, in ms"),
    Field("kept", "number", "the number of the newest generation when it began"),
    Field("is_late", "flag", "whether the worker belongs to an earlier run"),
    Field("earlier", "number", "how many earlier runs there are"),
    Field("others", "number", "how many other workers there are"),
    Field("pending", "number", "requests pending"),
    Field("in_flight", "number", "requests in flight"),
    Field("suspect", "number", "suspects"),
    Field("waiting", "number", "waiting rows"),
    Field("failed", "number", "failed rows"),
    Field("dead", "number", "dead rows"),
    Field("unreadable", "number", "unreadable rows"),
    Field("retried", "number", "failed and waiting rows that are about to become pending"),
    Field("ended", "text", "when the queue became empty, in ms; empty: it is not"),
    Field("last", "text", "the number of the last batch of the former id; empty: it is unknown"),
)

LEAVE = (
    Field("id", "text", "the id of the filter"),
    Field("worker", "text", "the id of the worker"),
)

LEAVE_REPLY = (
    Field("is_through", "flag", "whether no request of the worker is left to return"),
    Field("others", "number", "how many other workers there are"),
    Field("ended", "text", "when the queue became empty, in ms; empty: it is not"),
)

MOVE = (
    Field("from", "text", "the name of a key"),
    Field("to", "text", '"pending", or "" to drop the rows'),
    Field("first", "text", "where to begin in the sorted set, in the form of ZRANGEBYLEX"),
    Field("last", "text", "where to end"),
    Field("has_slot", "flag", "whether only rows of a slot are moved"),
    Field("slot", "text", "the slot"),
)

# Arguments of the script that records fingerprints without a queue.
RECORD = (
    Field("id", "text", "the id of the filter"),
    Field("version", "text", "the version of the generations"),
    Field("count_field", "text", "the field of the newest generation's count"),
    Field("mirror", "text", "the field of the mirror; empty without a mirror"),
    Field("number", "number", "the number of the batch"),
    Field(
        "mirror_value",
        "text",
        "the new value of that field: number and time in seconds; empty if this batch does not "
        "feed the mirror, and has the number of the batch before",
    ),
    Field("records", "flag", "whether to record the fingerprints"),
    GENERATIONS,
    Field("fingerprints", "texts", "the bits of the fingerprints"),
)

# Reads arguments.
_READERS = r"""
local at = 0
local function read_text()
  at = at + 1
  return ARGV[at]
end

local function read_number()
  return tonumber(read_text())
end

local function read_flag()
  return read_text() == '1'
end

local function read_rows(read)
  local list = {}
  for index = 1, read_number() do list[index] = read() end
  return list
end

local function read_texts()
  return read_rows(read_text)
end
"""


def named_keys(key: str) -> dict[str, str]:
    """Return the keys of a filter and its queue, without blocks, by their names in scripts."""
    return {name: f"{{{key}}}:{name}" if name != "filter" else key for name in KEYS}


def keys_of(key: str) -> list[str]:
    """Return the keys of a filter and its queue in the order of the scripts, without blocks."""
    return list(named_keys(key).values())


def words_of(fields: Sequence[Field], values: Mapping[str, Any]) -> list[Any]:
    """Return the arguments of a script.

    Args:
        fields: its fields.
        values: a value for each field; of "rows": such mappings.

    >>> row = Field("rows", "rows", "", [Field("a", "flag", ""), Field("b", "texts", "")])
    >>> words_of([Field("n", "number", ""), row], {"n": 3, "rows": [{"a": True, "b": ["x", "y"]}]})
    [3, 1, 1, 2, 'x', 'y']
    """
    words: list[Any] = []
    for name, kind, _, rows in fields:
        value = values[name]
        if kind == "rows":
            words.append(len(value))
            for row in value:
                words += words_of(rows, row)
        elif kind == "texts":
            words += [len(value), *value]
        else:
            words.append(int(value) if kind == "flag" else value)
    return words


def lua_keys() -> str:
    """Return Lua code that gives each key its name."""
    places = ", ".join(f"KEYS[{place + 1}]" for place in range(len(KEYS)))
    return f"local {', '.join(KEYS)} = {places}\n"


def lua_flags() -> str:
    """Return Lua code that gives each flag its name, in capitals."""
    flags = {**FLAGS, **ENTERED_FLAGS}
    letters = ", ".join(f"'{letter}'" for letter in flags.values())
    return f"local {', '.join(flags).upper()} = {letters}\n"


def lua_arguments(fields: Sequence[Field]) -> str:
    """Return Lua code that reads the arguments of a script into a table `given`."""
    lines = [_READERS]
    for name, kind, _, rows in fields:
        if kind == "rows":
            reads = " ".join(f"row.{each.name} = read_{each.kind}()" for each in rows)
            lines.append(f"local function read_{name}() local row = {{}} {reads} return row end")
    lines.append("local given = {}")
    for name, kind, _, rows in fields:
        reader = f"read_rows(read_{name})" if rows else f"read_{kind}()"
        lines.append(f"given.{name} = {reader}")
    return "\n".join(lines) + "\n"


def lua_reply(fields: Sequence[Field]) -> str:
    """Return Lua code of a function `replied`, which returns a table of fields as a reply."""
    values = ", ".join(
        f"values.{each.name} and 1 or 0" if each.kind == "flag" else f"values.{each.name}"
        for each in fields
    )
    return f"local function replied(values) return {{'ok', {values}}} end\n"


def parsed_reply(fields: Sequence[Field], reply: Sequence[Any]) -> dict[str, Any]:
    """Return the fields of a reply by their names."""
    return {field.name: value for field, value in zip(fields, reply[1:], strict=True)}
