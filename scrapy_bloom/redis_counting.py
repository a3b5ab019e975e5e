"""The script of a counting filter in Redis: one atomic step on one key for a fingerprint.

A block is four planes of 65,536 bits: the ones, twos, fours and eights of its counters, as in
`scrapy_bloom.counting`. Most counters are below 4, so the upper two planes are read only where the
lower two don't tell.
"""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

from scrapy_bloom.redis_client import Packed, import_redis
from scrapy_bloom.redis_errors import reason

LOOK, ADD, DISCARD = "look", "add", "discard"

SCRIPT = """
local key, operation, base, marks_at = KEYS[1], ARGV[1], tonumber(ARGV[2]), ARGV[3]
local PLANE = 65536
local ones, get = {}, {}
local function ask(offset)
    local n = #get
    get[n + 1], get[n + 2], get[n + 3] = 'GET', 'u1', offset
end

-- The lower two bits of each counter, and the marks of the key.
local count = #ARGV - 3
for i = 1, count do
    ones[i] = base + ARGV[i + 3]
    ask(ones[i])
end
for i = 1, count do ask(ones[i] + PLANE) end
local n = #get
get[n + 1], get[n + 2], get[n + 3] = 'GET', 'u2', marks_at
local low = redis.call('BITFIELD', key, unpack(get))
local marks = low[2 * count + 1]

-- The upper two bits, of some of them.
local fours, eights = {}, {}
local function read_upper(list)
    if #list == 0 then return end
    get = {}
    for _, i in ipairs(list) do
        ask(ones[i] + 2 * PLANE)
        ask(ones[i] + 3 * PLANE)
    end
    local upper = redis.call('BITFIELD', key, unpack(get))
    for j, i in ipairs(list) do fours[i], eights[i] = upper[2 * j - 1], upper[2 * j] end
end

local seen = 1
for i = 1, count do
    if low[i] + low[count + i] == 0 then
        read_upper({i})
        if fours[i] + eights[i] == 0 then
            seen = 0
            break
        end
    end
end
local SEALED = 3
if operation == 'look' or (operation == 'add' and (seen == 1 or marks == SEALED))
    or (operation == 'discard' and seen == 0) then
    return {seen, marks, 0}
end

local both = {}
for i = 1, count do
    if low[i] + low[count + i] == 2 then both[#both + 1] = i end
end
read_upper(both)
local set, saturated = {}, 0
local function write(plane, i, bit)
    local m = #set
    set[m + 1], set[m + 2], set[m + 3], set[m + 4] = 'SET', 'u1', ones[i] + plane * PLANE, bit
end
for i = 1, count do
    local one, two = low[i], low[count + i]
    if one + two == 2 and fours[i] + eights[i] == 2 then
        saturated = saturated + 1 -- it is at 15, and stays there
    elseif operation == 'add' then
        write(0, i, 1 - one)
        if one == 1 then
            write(1, i, 1 - two)
            if two == 1 then
                write(2, i, 1 - fours[i])
                if fours[i] == 1 then write(3, i, 1) end
            end
        end
    else
        write(0, i, 1 - one)
        if one == 0 then
            write(1, i, 1 - two)
            if two == 0 then
                write(2, i, 1 - fours[i])
                if fours[i] == 0 then write(3, i, 0) end
            end
        end
    end
end
if #set > 0 then redis.call('BITFIELD', key, unpack(set)) end
if operation == 'discard' then saturated = 0 end
return {seen, marks, saturated}
"""
_SHA1 = hashlib.sha1(SCRIPT.encode(), usedforsecurity=False).hexdigest()


def run(
    client: Any,
    key: bytes,
    operation: str,
    *,
    first_bit: int,
    positions: Sequence[int],
    marks_at: int,
) -> tuple[int, int, int]:
    """Add, discard or look for a fingerprint.

    Args:
        client: redis-py's.
        key: of the blocks.
        operation: LOOK, ADD (unless it is there, or the key is sealed), or DISCARD (if it is).
        first_bit: where in the key the block begins.
        positions: of the fingerprint's counters in the block.
        marks_at: where in the key the two marks are.

    Returns:
        1 if all counters were above 0 before, else 0; the marks; counts that were lost because a
        counter was at 15.
    """
    # Positions that coincide count once.
    words = (operation, first_bit, marks_at, *dict.fromkeys(positions))
    head = ("EVALSHA", _SHA1, 1, key)
    try:
        seen, marks, saturated = client.execute_command(*head, _packed((*head, *words)))
    except Exception as error:
        if not isinstance(reason(error), import_redis().exceptions.NoScriptError):
            raise
        # Not loaded yet, or the server has been restarted: nothing was executed.
        seen, marks, saturated = client.execute_command("EVAL", SCRIPT, 1, key, *words)
    return seen, marks, saturated


def _packed(words: Iterable[Any]) -> Packed:
    encoded = [word if isinstance(word, bytes) else str(word).encode() for word in words]
    head = b"*%d\r\n" % len(encoded)
    return Packed(head + b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in encoded]))
