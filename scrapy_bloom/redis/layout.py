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
    "pending": "requests that can be taken",
    "leased": "requests in flight",
    "suspects": "requests that were in flight in three workers that died",
    "dead": "suspects whose worker died, too",
    "unreadable": "requests that no worker of this run can deserialize",
    "failed": "requests that have failed for good",
    "given_up": "requests that have failed in five runs",
    "targets": "a hash: what has become of redirects, retries and failed requests, by fingerprint",
    "runs": "a hash: the ids of earlier runs, by their names",
    "workers": "a hash: the workers",
    "downloading": "requests that are not downloaded yet, if their slots have limits",
}

# The fields of the filter's hash that belong to the queue.
QUEUE_FIELDS = (
    *("pushed", "done", "requeued", "start", "crawl", "run", "run_name", "began", "arguments"),
    *("kept", "epoch", "ended", "last", "look", "crew"),
)


class Field(NamedTuple):
    """An argument of a script.

    Attributes:
        name: its name in Python and Lua.
        kind: "text"; "number"; "flag", which is 1 or 0; "texts", a number and so many texts;
            "hashes", the number of generations and the number of hashes of each, oldest first;
            "bits", a fingerprint by its positions in a block (2 bytes each, as many as the
            generation with the most hashes needs; empty: there is no fingerprint), and for each
            generation by the key of its block, the length of that key in bytes, and the first bit
            of the block in the key; "rows", a number and so many rows of other fields.
        about: what it is.
        rows: the fields of a row.
    """

    name: str
    kind: str
    about: str
    rows: Sequence["Field"] = ()


# Arguments of the script that applies a batch.
BATCH = (
    Field("id", "text", "the id of the filter"),
    Field("run", "text", "the id of the run"),
    Field("version", "text", "the version of the generations"),
    Field("worker", "text", "the id of the worker"),
    Field("number", "number", "the number of the batch"),
    Field("lease", "number", "the duration of the lease in ms"),
    Field("count_field", "text", "the field of the newest generation's count"),
    Field("hashes", "hashes", "the generations"),
    Field("lasting", "number", "the place of the first generation that lasts as long as the run"),
    Field(
        "entered",
        "rows",
        "requests that enter the queue",
        (
            Field("is_filtered", "flag", "whether it is queued only if it is new"),
            Field("is_recorded", "flag", "whether its fingerprint is recorded"),
            Field("newest_first", "flag", "whether the newest comes first"),
            Field("order", "text", "the beginning of its member, up to its position"),
            Field("data", "text", "the serialized request"),
            Field("via", "texts", "fingerprints in whose place it entered"),
            Field("bits", "bits", "its fingerprint"),
            Field("once", "bits", "its fingerprint in this run, if it is new once in each run"),
            Field("fingerprint", "text", "its fingerprint as it is"),
        ),
    ),
    Field(
        "recorded",
        "rows",
        "fingerprints that are recorded without a request",
        (Field("bits", "bits", "the fingerprint"),),
    ),
    Field(
        "ended",
        "rows",
        "requests that have ended",
        (
            Field("token", "text", "the token of its lease"),
            Field("how", "text", "done, replaced, failed or unreadable"),
            Field("via", "texts", "its fingerprint, and those in whose place it entered"),
            Field("fingerprint", "text", "of a failed request: its fingerprint"),
            Field("tries", "number", "of a failed request: in how many runs it had failed before"),
            Field("reason", "text", "of a failed request: why"),
            Field("newest_first", "flag", "of a failed request: whether the newest comes first"),
            Field("order", "text", "of a failed request: the beginning of its member"),
            Field("data", "text", "of a failed request: the serialized request, as it entered"),
        ),
    ),
    Field("asked", "texts", "fingerprints whose fate the reply tells"),
    Field(
        "downloaded",
        "rows",
        "requests that are downloaded",
        (
            Field("token", "text", "the token of its lease"),
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
    Field("queued", "text", "1 or 0 for each request that entered; empty if a reply was lost"),
    Field(
        "places",
        "text",
        "for each fingerprint that entered, that of its run after it, and each recorded one: the "
        'place of a generation that has it now, as a character; "n": none; empty if a reply was '
        "lost",
    ),
    Field("fates", "text", "u (unfinished), f (failed) or - for each fingerprint asked about"),
    Field("count", "number", "how many requests are recorded in the newest generation"),
    Field("taken", "texts", "the leases of the requests that this batch has taken"),
    Field("start", "text", 'the worker that runs start(), or "done"'),
    Field("left", "number", "requests pending, suspect, in flight, or about to become pending"),
    Field("pending", "number", "requests pending"),
    Field("pushed", "number", "how many requests have entered the queue"),
    Field("done", "number", "how many requests have left it"),
    Field("ended", "text", "when the queue became empty, in ms; empty: it is not"),
    Field("died", "texts", "members that this batch has made dead"),
    Field("given_up", "number", "how many requests this batch has given up"),
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
    Field("arguments", "text", "the arguments of the run, if they are not stored yet"),
)

JOIN_REPLY = (
    Field("run", "text", "the id of the current run"),
    Field("run_name", "text", "its name"),
    Field("began", "text", "when it began, in ms"),
    Field("arguments", "text", "its arguments"),
    Field("kept", "number", "the number of the newest generation when it began"),
    Field("is_late", "flag", "whether the worker belongs to an earlier run"),
    Field("earlier", "number", "how many earlier runs there are"),
    Field("others", "number", "how many other workers there are"),
    Field("pending", "number", "requests pending"),
    Field("in_flight", "number", "requests in flight"),
    Field("suspect", "number", "suspects"),
    Field("failed", "number", "failed requests"),
    Field("dead", "number", "dead requests"),
    Field("unreadable", "number", "unreadable requests"),
    Field("retried", "number", "failed requests that are about to become pending"),
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
    Field("to", "text", '"pending", or "" to drop the requests'),
    Field("first", "text", "where to begin in the sorted set, in the form of ZRANGEBYLEX"),
    Field("last", "text", "where to end"),
    Field("has_slot", "flag", "whether only requests of a slot are moved"),
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
    Field("hashes", "hashes", "the generations"),
    Field("fingerprints", "rows", "the fingerprints", (Field("bits", "bits", "the fingerprint"),)),
)

# Reads arguments. `bits` needs the generations, so that field comes before all of its kind.
_READERS = r"""
local at = 0
local function text()
  at = at + 1
  return ARGV[at]
end

local function number()
  return tonumber(text())
end

local function flag()
  return text() == '1'
end

local function rows(read)
  local list = {}
  for index = 1, number() do list[index] = read() end
  return list
end

local function texts()
  return rows(text)
end

local generations, layout  -- the number of hashes of each generation; how positions are packed
local function hashes()
  generations = rows(number)
  layout = '>' .. string.rep('H', math.max(unpack(generations)))
  return generations
end

local function bits()
  local packed = text()
  if packed == '' then return nil end
  local found = {positions = {struct.unpack(layout, packed)}}
  for place = 1, #generations do
    found[place] = {key = text(), length = number(), first = number()}
  end
  return found
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
        values: a value for each field; of "bits": the words, or None; of "rows": such mappings.

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
        elif kind in {"texts", "hashes"}:
            words += [len(value), *value]
        elif kind == "bits":
            words += value or [b""]
        else:
            words.append(int(value) if kind == "flag" else value)
    return words


def lua_keys() -> str:
    """Return Lua code that gives each key its name."""
    places = ", ".join(f"KEYS[{place + 1}]" for place in range(len(KEYS)))
    return f"local {', '.join(KEYS)} = {places}\n"


def lua_arguments(fields: Sequence[Field]) -> str:
    """Return Lua code that reads the arguments of a script into a table `given`."""
    lines = [_READERS]
    for name, kind, _, rows in fields:
        if kind == "rows":
            reads = " ".join(f"row.{each.name} = {each.kind}()" for each in rows)
            lines.append(f"local function {name}_row() local row = {{}} {reads} return row end")
    lines.append("local given = {}")
    for name, kind, _, rows in fields:
        reader = f"rows({name}_row)" if rows else f"{kind}()"
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
