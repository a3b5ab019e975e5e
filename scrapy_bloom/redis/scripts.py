"""Lua scripts for a filter and a queue in Redis or Valkey. A script is atomic.

`scrapy_bloom.redis.layout` has the keys, and the arguments of the scripts. All keys of a filter
`<key>` are in one slot of a Cluster. In addition, there are

    {<key>}:blocks:<id>:<c>   the blocks of a generation, 127 per key, in the format of files; they
                              expire in an hour until the generation is in the hash
    {<key>}:maker             a string: the process that is making a generation; expires in a minute

The fields of the filter's hash `<key>`:

    id                        random; another id is another filter, with another queue
    filter                    JSON: salt, fingerprinter, spider, ...
    version                   changes with the generations, and with the sample
    sample                    JSON: masked URLs, and digests of their fingerprints
    gen:<n>                   JSON: generation n: id, geometry, capacity, error rate, times
    count:<n>                 how many requests are recorded in generation n
    persist:<id>              number of keys of a new generation that still expire; any crawl that
                              reads this field makes them permanent, and removes the field
    unlink:<id>               number of keys of an expired generation; any crawl that reads this
                              field removes them, and then the field
    mirror:<name>             of a crawl without this queue: number of its last batch, and time of
                              that batch in seconds; without the field, its batches are refused
    pushed, done              how many requests have entered the queue, and have left it
    requeued                  how many failed requests have become pending again
    crawl                     name of the spider whose queue it is
    run, run_name             id and name of the current run
    began                     when that run began, in ms since 1970
    arguments                 JSON: digests of the arguments of that run; none if a command has
                              begun it
    kept                      number of the newest generation when the run began: requests recorded
                              from then on do not expire until the run has ended
    epoch                     raised when a run begins, or when a finished one tries its failed
                              requests again
    start                     the worker that runs the spider's start(); "done" when it has ended
    ended                     when the queue became empty, in ms since 1970
    last                      the slot from which a request was taken last
    crew                      the approximate number of workers
    look                      when to check for expired leases next, in ms

All sets of requests are sorted sets with scores 0, so they are in the order of their members:

    pending, suspects, dead,  slot, NUL, priority (8 bytes), rank (1), position (8), number of tries
    unreadable                (1), number of deaths (1), the workers that died with the request in
                              flight (16 each), the request
    leased                    worker (16), token (8), the member as it was in pending
    given_up                  length of the fingerprint (4), the fingerprint, number of tries (1),
                              length of the reason (2), the reason, 1 if the newest comes first (1),
                              slot, NUL, priority (8), rank (1), the request
    failed                    the epoch in which it failed (4), 1 if the next epoch gives it up
                              (1), and the same as in given_up
    downloading               either slot, NUL, worker, token of a leased request that is not
                              downloaded yet, if its slot has a limit; or slot, NUL, worker, 255,
                              until when no other worker may take a request of the slot (7), and
                              how long that pause is (4), in ms

The values of `targets` are "u" while a request of the fingerprint is unfinished, and "f" when it
has failed in this epoch. The fields of `workers`:

    <worker>                  when its lease expires, in ms since 1970; without this field, its
                              requests belong to no worker
    <worker>:number           number of its last batch; "gone", that number and a time in ms when
                              the worker has lost its lease, or has rejoined: then its batches are
                              refused, and an hour later its fields are removed
    <worker>:name             host:pid, for `info`
    <worker>:lease            how long its lease lasts, in ms, for `info`
    <worker>:done             how many requests it has finished, for `info`
    <worker>:suspect          token of the suspect that is leased to it
    <worker>:stop             set by `scrapy bloom stop`, which asks the worker to shut down
    <worker>:back             set when the worker has rejoined after it had lost its lease, so its
                              requests have not killed it
    <worker>:dead             beginning of the dead request that its death has made

Numbers are big-endian. A priority is stored as 2^63 - 1 - priority, a rank as rank + 128. A
position is n, or 2^53 - n where the newest comes first; n is the value of `pushed` and `requeued`
together, with the request. A token is the number of the batch in which a request was taken (6
bytes), and its index in the batch (2): a worker uses it only once. The clock is the server's.

A script that fails half-way keeps what it has written. So a request is added to its new set before
it is removed from its old set, `pushed` is raised after a request was added, `done` before a
request is removed, and the number of a batch is written last.
"""

from scrapy_bloom.redis.layout import JOIN as JOIN_FIELDS
from scrapy_bloom.redis.layout import (
    JOIN_REPLY,
    KEYS,
    LEAVE_REPLY,
    lua_arguments,
    lua_keys,
    lua_reply,
)
from scrapy_bloom.redis.layout import LEAVE as LEAVE_FIELDS
from scrapy_bloom.redis.layout import MOVE as MOVE_FIELDS

# Blocks of 8 KiB per key. With the allocator's header, a key takes 1 MiB; with 128 blocks, it would
# take 1.25 MiB.
CHUNK_BLOCKS = 127
WORKER_BYTES, TOKEN_BYTES = 16, 8

# The beginning of all scripts.
BASE = r"""
local call = redis.call
"""

# The beginning of scripts that change the queue.
COMMON = (
    BASE
    + lua_keys()
    + r"""
local MOST_DEATHS, MOST_TRIES = 3, 5
local LINKED = 'a redirect to it has failed'
local time = call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

-- Returns fields of the filter's hash by their names.
local function read_state(...)
  local values, state = call('HMGET', filter, ...), {}
  for index, name in ipairs({...}) do state[name] = values[index] or nil end
  state.epoch = tonumber(state.epoch) or 0
  return state
end

-- How many requests and bytes the script may still move, so that it takes no longer than 5 ms.
local moves, bytes = 100, 262144
local function may_move()
  return moves > 0 and bytes > 0
end

local function moved(entry)
  moves, bytes = moves - 1, bytes - #entry
end

local function move(from, entry, to, as)
  call('ZADD', to, 0, as)
  call('ZREM', from, entry)
  moved(entry)
end

local function first_of(key, prefix)
  return call('ZRANGEBYLEX', key, '[' .. prefix, '(' .. prefix .. '\255', 'LIMIT', 0, 1)[1]
end

-- The number of tries of a member is followed by that of its deaths.
local function tries_at(member)
  return string.find(member, '\0', 1, true) + 18
end

local function deaths_of(member)
  local place, died = tries_at(member) + 1, 0
  for index = 1, string.byte(member, place) do
    local worker = string.sub(member, place + 16 * index - 15, place + 16 * index)
    if call('HEXISTS', workers, worker .. ':back') == 0 then died = died + 1 end
  end
  return died
end

local function blamed(member, worker)
  local place = tries_at(member) + 1
  local number = string.byte(member, place)
  if number == 255 then return member end
  return string.sub(member, 1, place - 1) .. string.char(number + 1)
      .. string.sub(member, place + 1, place + 16 * number) .. worker
      .. string.sub(member, place + 16 * number + 1)
end

-- Returns a member without tries and deaths.
local function blameless(member)
  local place = tries_at(member)
  return string.sub(member, 1, place - 1) .. '\0\0'
      .. string.sub(member, place + 2 + 16 * string.byte(member, place + 1))
end

-- Returns the beginning of a new member in pending. The caller raises `pushed` or `requeued` next.
local function positioned(order, state, newest_first)
  local position = (tonumber(state.pushed) or 0) + (tonumber(state.requeued) or 0) + 1
  if newest_first then position = 2^53 - position end
  return order .. struct.pack('>I8', position)
end

-- Returns the beginning of a member of failed, up to its fingerprint: the next epoch gives up a
-- request that would have failed in too many runs.
local function failed_start(epoch, tries)
  return struct.pack('>I4', epoch) .. (tries + 1 < MOST_TRIES and '\0' or '\1')
end

-- A member of given_up, and the rest of a member of failed.
local function failure_start(fingerprint)
  return struct.pack('>I4', #fingerprint) .. fingerprint
end

local function failure(fingerprint, tries, reason, newest_first, rest)
  return failure_start(fingerprint) .. struct.pack('>BH', tries, #reason) .. reason
      .. (newest_first and '\1' or '\0') .. rest
end

local function parsed_failure(from, member)
  if from == failed then member = string.sub(member, 6) end
  local length = struct.unpack('>I4', member)
  local at = 5 + length
  local tries, reason_length = struct.unpack('>BH', member, at)
  local reason_ends = at + 2 + reason_length
  return {
    fingerprint = string.sub(member, 5, 4 + length),
    tries = tries,
    reason = string.sub(member, at + 3, reason_ends),
    newest_first = string.byte(member, reason_ends + 1) == 1,
    rest = string.sub(member, reason_ends + 2),
  }
end

-- Makes a request of failed or given_up pending.
local function retry(from, member, tries, state)
  local row = parsed_failure(from, member)
  local order_ends = string.find(row.rest, '\0', 1, true) + 9
  call('ZADD', pending, 0,
       positioned(string.sub(row.rest, 1, order_ends), state, row.newest_first)
       .. string.char(tries) .. '\0' .. string.sub(row.rest, order_ends + 1))
  call('HSET', targets, row.fingerprint, 'u')
  state.requeued = call('HINCRBY', filter, 'requeued', 1)
  call('ZREM', from, member)
  moved(member)
end

-- How many failed requests are about to become pending: those of an earlier epoch.
local function count_earlier(epoch)
  return call('ZLEXCOUNT', failed, '-', '(' .. struct.pack('>I4', epoch))
end

local function epoch_of(member)
  return (struct.unpack('>I4', member))
end

-- How many of these become pending, and are not given up.
local function count_retried(epoch)
  local first, number = call('ZRANGE', failed, 0, 0)[1], 0
  for earlier = first and epoch_of(first) or epoch, epoch - 1 do
    number = number + call('ZLEXCOUNT', failed, '[' .. failed_start(earlier, 0),
                           '(' .. failed_start(earlier, MOST_TRIES))
  end
  return number
end

-- Makes the requests of a worker pending again, but one that has killed it alone dead. Returns the
-- number of the pending ones, and whether no more are left.
-- If there are too many for one script, the next check for expired leases finds the rest.
local function give_back(worker, is_blamed, died)
  local last = call('HGET', workers, worker .. ':number')
  if tonumber(last) then
    call('HSET', workers, worker .. ':number', string.format('gone %s %.0f', last, now))
  end
  if not is_blamed then call('HDEL', workers, worker) end
  if call('HGET', filter, 'start') == worker then call('HDEL', filter, 'start') end
  local suspect, given = is_blamed and call('HGET', workers, worker .. ':suspect'), 0
  while may_move() do
    local entry = first_of(leased, worker)
    if not entry then
      call('HDEL', workers, worker, worker .. ':name', worker .. ':suspect', worker .. ':done',
           worker .. ':lease')
      -- If it has only been away, it shall end when it is back.
      if not is_blamed then call('HDEL', workers, worker .. ':stop') end
      return given, true
    end
    local member, to = string.sub(entry, 25), pending
    if suspect and suspect == string.sub(entry, 17, 24) then
      to = dead
      call('HSET', workers, worker .. ':dead', string.sub(member, 1, tries_at(member) - 1))
      died[#died + 1] = member
    else
      if is_blamed and not suspect then member = blamed(member, worker) end
      if deaths_of(member) >= MOST_DEATHS then to = suspects end
      given = given + 1
    end
    move(leased, entry, to, member)
  end
  return given, false
end

local function alive_but(worker)
  local alive, all = 0, call('HGETALL', workers)
  for index = 1, #all, 2 do
    if #all[index] == 16 and all[index] ~= worker and tonumber(all[index + 1]) >= now then
      alive = alive + 1
    end
  end
  return alive
end
"""
)

# Adds a worker, and begins a run if that is new. The script is idempotent.
JOIN = (
    COMMON
    + lua_arguments(JOIN_FIELDS)
    + lua_reply(JOIN_REPLY)
    + r"""
local me, former = given.worker, given.former
local state = read_state('id', 'crawl', 'run', 'run_name', 'began', 'arguments', 'kept', 'epoch',
                         'start', 'ended')
if state.id ~= given.id then return {'other'} end
if state.crawl and state.crawl ~= given.spider then return {'spider', state.crawl} end

local is_late, begins = false, not state.run
if state.run and state.run ~= given.run and state.run_name ~= given.run_name then
  if given.began ~= '' then  -- another worker, or an older state of the server, has another run
    is_late = tonumber(state.began) >= tonumber(given.began)
  elseif given.run_name ~= '' then
    is_late = call('HEXISTS', runs, given.run_name) == 1
  end
  begins = not is_late and given.run_name ~= ''
end
if begins then
  local began = given.began
  if state.run then call('HSET', runs, state.run_name, state.run) end
  if began == '' then
    began = string.format('%.0f', math.max(now, (tonumber(state.began) or 0) + 1))
  end
  call('UNLINK', targets)
  call('HDEL', filter, 'start', 'ended')
  call('HSET', filter, 'crawl', given.spider, 'run', given.run, 'run_name', given.run_name,
       'began', began, 'arguments', given.arguments, 'kept', given.newest,
       'epoch', state.epoch + 1)
elseif former == '' and given.run_name == '' and state.start == 'done'
    and count_earlier(state.epoch) == 0
    and alive_but(me) == 0
    and call('ZCARD', pending) + call('ZCARD', leased) + call('ZCARD', suspects)
        + call('ZCARD', unreadable) == 0 then
  call('UNLINK', targets)
  if call('ZCARD', failed) > 0 then
    call('HDEL', filter, 'ended')
    call('HSET', filter, 'epoch', state.epoch + 1)
  end
end
if not is_late and call('HGET', filter, 'arguments') == '{}' then
  call('HSET', filter, 'arguments', given.arguments)  -- `scrapy bloom add` has begun the run
end

local last = ''
if former ~= '' then
  last = call('HGET', workers, former .. ':number') or ''
  if not tonumber(last) then call('HSET', workers, former .. ':back', 1) end
  local letter = call('HGET', workers, former .. ':dead')
  local member = letter and first_of(dead, letter)
  if member then move(dead, member, suspects, member) end
  call('HDEL', workers, former .. ':dead')
  if call('HEXISTS', workers, former .. ':stop') == 1 then
    call('HSET', workers, me .. ':stop', 1)
  end
  give_back(former, false)
end
call('HSET', workers, me, now + given.lease, me .. ':name', given.name,
     me .. ':lease', given.lease)
call('HSETNX', workers, me .. ':number', 0)

state = read_state('run', 'run_name', 'began', 'arguments', 'kept', 'epoch', 'ended')
return replied({
  run = state.run, run_name = state.run_name or '', began = state.began or '0',
  arguments = state.arguments or '{}', kept = state.kept or given.newest, is_late = is_late,
  earlier = call('HLEN', runs), others = alive_but(me),
  pending = call('ZCARD', pending), in_flight = call('ZCARD', leased),
  suspect = call('ZCARD', suspects), failed = call('ZCARD', failed),
  dead = call('ZCARD', dead) + call('ZCARD', given_up), unreadable = call('ZCARD', unreadable),
  retried = count_retried(state.epoch), ended = state.ended or '',
  last = string.match(last, '^%d+$') or string.match(last, '^gone (%d+)') or '',
})
"""
)

# Removes a worker. To be repeated until the reply says that no request is left to return.
LEAVE = (
    COMMON
    + lua_arguments(LEAVE_FIELDS)
    + lua_reply(LEAVE_REPLY)
    + r"""
local me = given.worker
if call('HGET', filter, 'id') ~= given.id then return {'other'} end
local _, is_through = give_back(me, false)
if is_through then call('HDEL', workers, me .. ':number') end
local others = alive_but(me)
local number = call('ZCARD', pending) + call('ZCARD', suspects) + call('ZCARD', leased)
if is_through and others + number == 0 then call('UNLINK', workers, downloading) end
return replied({is_through = is_through, others = others,
                ended = call('HGET', filter, 'ended') or ''})
"""
)

# Makes requests pending with no deaths and tries counted, or drops them, some at a time. Returns
# the number of requests that were moved, and the next value of `first`; '' if there are no more.
MOVE = (
    COMMON
    + lua_arguments(MOVE_FIELDS)
    + r"""
local state = read_state('pushed', 'requeued', 'epoch')
local sets = {pending = pending, dead = dead, unreadable = unreadable, failed = failed,
              given_up = given_up}
local from, number, next_one = sets[given.from], 0, given.first
local is_failure = from == failed or from == given_up

local function drop(member)
  call('HINCRBY', filter, 'done', 1)
  call('ZREM', from, member)
  moved(member)
end

local function make_pending(member)
  call('HDEL', filter, 'ended')
  if is_failure then
    retry(from, member, 0, state)
  elseif from == unreadable then
    move(from, member, pending, member)
  elseif from ~= pending then
    move(from, member, pending, blameless(member))
  else
    local same = blameless(member)
    if same == member then moved(member) else move(pending, member, pending, same) end
  end
end

while may_move() do
  local member = call('ZRANGEBYLEX', from, next_one, given.last, 'LIMIT', 0, 1)[1]
  if not member then
    next_one = ''
    break
  end
  next_one = '(' .. member
  local rest = is_failure and parsed_failure(from, member).rest or member
  local slot = string.sub(rest, 1, string.find(rest, '\0', 1, true) - 1)
  if given.has_slot and slot ~= given.slot then
    moved(member)
  elseif given.to == '' then
    drop(member)
    number = number + 1
  else
    make_pending(member)
    number = number + 1
  end
end
return {number, next_one}
"""
)

# The beginning of scripts that change the filter.
_WORDS = (
    BASE
    + r"""
local filter = KEYS[1]
local at = 0
local function arg()
  at = at + 1
  return ARGV[at]
end

local function number()
  return tonumber(arg())
end
"""
)

# Arguments: id, version, next version; the number of fields to remove, and their names; the number
# of fields to set, and their names and values.
CHANGE = (
    _WORDS
    + r"""
local id, version, next_version = arg(), arg(), arg()
local state = call('HMGET', filter, 'id', 'version')
if state[1] ~= id then return {'other'} end
if state[2] == next_version then return {'ok'} end  -- the reply was lost
if state[2] ~= version then return {'version'} end
for _ = 1, number() do call('HDEL', filter, arg()) end
local fields = {'version', next_version}
for index = 3, 2 * number() + 2 do fields[index] = arg() end
call('HSET', filter, unpack(fields))
return {'ok'}
"""
)

# Keys: those of all scripts; then temporary sets, and their final names. Arguments: id of a new
# filter; how many members each set must have; the number of the filter's fields, and these fields.
# Nothing is changed if the filter exists. Until the hash is written, the sets expire.
CREATE = (
    _WORDS
    + r"""
local id, ours = arg(), """
    + str(len(KEYS))
    + r"""
local sets = (#KEYS - ours) / 2
local found = call('HGET', filter, 'id')
if found then return {found == id and 'ok' or 'other'} end  -- our id: the reply was lost
local numbers = {}
for index = 1, sets do
  numbers[index] = number()
  if call('ZCARD', KEYS[ours + index]) ~= numbers[index] then return {'lost'} end
end
local fields = {'id', id}
for index = 3, 2 * number() + 2 do fields[index] = arg() end
call('UNLINK', unpack(KEYS, 2, ours))
for index = 1, sets do
  local from, to = KEYS[ours + index], KEYS[ours + sets + index]
  if numbers[index] > 0 then call('RENAME', from, to) end
end
call('HSET', filter, unpack(fields))
for index = 1, sets do call('PERSIST', KEYS[ours + sets + index]) end
return {'ok'}
"""
)

# Keys: of blocks. Arguments: seconds until they expire; the length of each in bytes. An existing
# key is not changed, because a repeated call may arrive late; but the write to it fails if the
# server's memory is full.
MAKE = (
    _WORDS
    + r"""
local secs = arg()
for _, key in ipairs(KEYS) do
  local is_new = call('EXISTS', key) == 0
  call('BITFIELD', key, 'INCRBY', 'u1', 8 * number() - 1, 0)
  if is_new then call('EXPIRE', key, secs) end
end
"""
)

# Removes a filter and its queue in one step; the caller removes the blocks. Argument: id.
REMOVE = (
    _WORDS
    + r"""
if call('HGET', filter, 'id') ~= arg() then return {'other'} end
call('UNLINK', unpack(KEYS))
return {'ok'}
"""
)


def maker_key(key: str) -> str:
    """Return the name of the lock for making a generation."""
    return f"{{{key}}}:maker"


def block_keys(key: str, generation_id: str, number: int) -> list[str]:
    """Return the names of all keys of blocks of a generation."""
    return [block_key(key, generation_id, chunk) for chunk in range(number)]


def block_key(key: str, generation_id: str, chunk: int) -> str:
    """Return the name of a key of blocks."""
    return f"{{{key}}}:blocks:{generation_id}:{chunk}"
