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
from scrapy_bloom.sizing import BLOCK_BITS

LOOK, ADD, DISCARD = "look", "add", "discard"

SCRIPT = """
-- ARGV: the operation, where the marks are, and where in the key the ones are, then the twos: given
-- as text, which Lua would take long to make of numbers.
local key, operation, marks_at = KEYS[1], ARGV[1], ARGV[2]
local PLANE, SEALED = 65536, 3
local count = (#ARGV - 2) / 2

-- The lower two bits of each counter, and the marks of the key.
local get, n = {}, 0
for i = 3, 2 + 2 * count do
    get[n + 1], get[n + 2], get[n + 3] = 'GET', 'u1', ARGV[i]
    n = n + 3
end
get[n + 1], get[n + 2], get[n + 3] = 'GET', 'u2', marks_at
local low = redis.call('BITFIELD', key, unpack(get))
local marks = low[2 * count + 1]

-- The upper two bits, of some of them.
local fours, eights = {}, {}
local function read_upper(list)
    if #list == 0 then return end
    get, n = {}, 0
    for _, i in ipairs(list) do
        for plane = 2, 3 do
            get[n + 1], get[n + 2], get[n + 3] = 'GET', 'u1', ARGV[2 + i] + plane * PLANE
            n = n + 3
        end
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
n = 0
local OTHER = {[0] = '1', [1] = '0'}
local function flip(offset, bit)
    set[n + 1], set[n + 2], set[n + 3], set[n + 4] = 'SET', 'u1', offset, OTHER[bit]
    n = n + 4
end
-- Counting up, a plane carries on to the next one where its bit was 1; down, where it was 0.
local carries = operation == 'add' and 1 or 0
for i = 1, count do
    local one, two = low[i], low[count + i]
    if one + two == 2 and fours[i] + eights[i] == 2 then
        saturated = saturated + carries -- it is at 15, and stays there
    else
        flip(ARGV[2 + i], one)
        if one == carries then
            flip(ARGV[2 + count + i], two)
            if two == carries then
                flip(ARGV[2 + i] + 2 * PLANE, fours[i])
                if fours[i] == carries then flip(ARGV[2 + i] + 3 * PLANE, eights[i]) end
            end
        end
    end
end
if n > 0 then redis.call('BITFIELD', key, unpack(set)) end
return {seen, marks, saturated}
"""
_SHA1 = hashlib.sha1(SCRIPT.encode(), usedforsecurity=False).hexdigest()


def load(client: Any, key: bytes, marks_at: int) -> None:
    """Have the server know the script, by a call that changes nothing."""
    client.execute_command("EVAL", SCRIPT, 1, key, LOOK, marks_at, 0, BLOCK_BITS)


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
    ones = [first_bit + position for position in dict.fromkeys(positions)]  # each counts once
    words = (operation, marks_at, *ones, *(each + BLOCK_BITS for each in ones))
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
