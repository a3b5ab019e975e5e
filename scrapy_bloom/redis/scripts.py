"""Lua scripts for a filter and a queue in Redis or Valkey, and their keys. A script is atomic.

All keys of a filter `<key>` are in one slot of a Cluster:

    <key>                     a hash
      id                        random; another id is another filter, with another queue
      filter                    JSON: salt, fingerprinter, spider, ...
      version                   changes with the generations
      gen:<n>                   JSON: generation n: id, geometry, capacity, error rate, times
      count:<n>                 how many requests are recorded in generation n
      persist:<id>              number of keys of a new generation that still expire; any crawl that
                                reads this field makes them permanent, and removes the field
      unlink:<id>               number of keys of an expired generation; any crawl that reads this
                                field removes them, and then the field
      mirror:<name>             of a crawl without this queue: number of its last batch, and time of
                                that batch in seconds; without the field, its batches are refused
      forgets                   how often fingerprints were forgotten
      pushed, done              how many requests have entered the queue, and have left it
      start                     the worker that runs the spider's start(); "done" when it has ended
      crawl                     name of the spider whose queue it is
      kept                      number of the newest generation when the queue was created: requests
                                recorded from then on do not expire until the crawl has ended
      ended                     when the queue became empty, in ms since 1970
      last                      the slot from which a request was taken last
      crew                      the approximate number of workers
      look                      when to check for expired leases next, in ms
    {<key>}:blocks:<id>:<c>   the blocks of a generation, 127 per key, in the format of files; they
                              expire in an hour until the generation is in the hash
    {<key>}:maker             a string: the process that is making a generation; expires in a minute
    {<key>}:forgotten         a sorted set: fingerprints, by the time of forgetting in seconds
    {<key>}:pending           a sorted set of requests. All scores are 0, so it is in the order of
                              its members: slot, NUL, priority (8 bytes), rank (1), position (8),
                              number of deaths (1), the workers that died with the request in flight
                              (16 each), the request
    {<key>}:suspects          members like those of pending: requests with three such workers
    {<key>}:dead              members like those of pending: suspects whose worker died, too
    {<key>}:aside             members like those of pending: requests that no worker of this run can
                              deserialize
    {<key>}:leased            a sorted set with scores 0: worker (16 bytes), token (8), the member
                              as it was in pending
    {<key>}:downloading       a sorted set with scores 0. Either slot, NUL, worker, token of a
                              leased request that is not downloaded yet, if its slot has a limit; or
                              slot, NUL, worker, 255, and until when no other worker may take a
                              request of the slot (7 bytes), in ms
    {<key>}:workers           a hash
      <worker>                  when its lease expires, in ms since 1970; without this field, its
                                requests belong to no worker
      <worker>:number           number of its last batch; with "gone " before it when the worker has
                                lost its lease, or has rejoined: then its batches are refused
      <worker>:name             host:pid, for `info`
      <worker>:lease            how long its lease lasts, in ms, for `info`
      <worker>:done             how many requests it has finished, for `info`
      <worker>:suspect          token of the suspect that is leased to it
      <worker>:stop             set by `scrapy bloom stop`, which asks the worker to shut down
      <worker>:back             set when the worker has rejoined after it had lost its lease, so its
                                requests have not killed it
      <worker>:dead             beginning of the dead letter that its death has made

Numbers are big-endian. A priority is stored as 2^63 - 1 - priority, a rank as rank + 128. A
position is n, or 2^53 - n where the newest comes first; n is the value of `pushed` with the
request. A token is the number of the batch in which a request was taken (6 bytes), and its index in
the batch (2): a worker uses it only once. The clock is the server's.

A script that fails half-way keeps what it has written. So a request is added to its new set before
it is removed from its old set, `pushed` is raised after a request was added, `done` before a
request is removed, and the number of a batch is written last.
"""

# Blocks of 8 KiB per key. With the allocator's header, a key takes 1 MiB; with 128 blocks, it would
# take 1.25 MiB.
CHUNK_BLOCKS = 127
WORKER_BYTES, TOKEN_BYTES = 16, 8

# The beginning of all scripts.
BASE = r"""
local call = redis.call
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

# The beginning of scripts that change the queue.
COMMON = (
    BASE
    + r"""
local pending, leased, workers = KEYS[2], KEYS[3], KEYS[4]
local suspects, dead, aside, downloading = KEYS[5], KEYS[6], KEYS[7], KEYS[8]
local MOST_DEATHS = 3
local time = call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

-- How many requests and bytes the script may still move, so that it takes no longer than 5 ms.
local moves, bytes = 100, 262144
local function may_move()
  return moves > 0 and bytes > 0
end

local function move(from, entry, to, as)
  call('ZADD', to, 0, as)
  call('ZREM', from, entry)
  moves, bytes = moves - 1, bytes - #entry
end

local function first_of(key, prefix)
  return call('ZRANGEBYLEX', key, '[' .. prefix, '(' .. prefix .. '\255', 'LIMIT', 0, 1)[1]
end

-- Returns the index of the byte that counts the deaths of a member.
local function deaths_at(member)
  return string.find(member, '\0', 1, true) + 18
end

local function deaths_of(member)
  local place, died = deaths_at(member), 0
  for index = 1, string.byte(member, place) do
    local worker = string.sub(member, place + 16 * index - 15, place + 16 * index)
    if call('HEXISTS', workers, worker .. ':back') == 0 then died = died + 1 end
  end
  return died
end

local function blamed(member, worker)
  local place = deaths_at(member)
  local number = string.byte(member, place)
  if number == 255 then return member end
  return string.sub(member, 1, place - 1) .. string.char(number + 1)
      .. string.sub(member, place + 1, place + 16 * number) .. worker
      .. string.sub(member, place + 16 * number + 1)
end

-- Makes the requests of a worker pending again. Returns their number, and whether no more are left.
-- If there are too many for one script, the next check for expired leases finds the rest.
local function give_back(worker, is_blamed, died)
  local last = call('HGET', workers, worker .. ':number')
  if tonumber(last) then call('HSET', workers, worker .. ':number', 'gone ' .. last) end
  if not is_blamed then call('HDEL', workers, worker) end
  if call('HGET', filter, 'start') == worker then call('HDEL', filter, 'start') end
  local suspect, given = is_blamed and call('HGET', workers, worker .. ':suspect'), 0
  while may_move() do
    local entry = first_of(leased, worker)
    if not entry then
      call('HDEL', workers, worker, worker .. ':name', worker .. ':suspect', worker .. ':stop',
           worker .. ':done', worker .. ':lease')
      return given, true
    end
    local member, to = string.sub(entry, 25), pending
    if suspect and suspect == string.sub(entry, 17, 24) then
      to = dead
      call('HSET', workers, worker .. ':dead', string.sub(member, 1, deaths_at(member) - 1))
      died[#died + 1] = member
    else
      if is_blamed and not suspect then member = blamed(member, worker) end
      if deaths_of(member) >= MOST_DEATHS then to = suspects end
    end
    move(leased, entry, to, member)
    given = given + 1
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

# Arguments: id, worker, its name, the spider's name, lease in ms, the worker's former id or '', the
# number of the newest generation. The script is idempotent. The reply ends with the number of the
# last batch under the former id; '' if the server does not have it.
JOIN = (
    COMMON
    + r"""
local id, me, name, spider, lease, former, newest =
  arg(), arg(), arg(), arg(), number(), arg(), arg()
local state = call('HMGET', filter, 'id', 'crawl', 'ended')
if not state[1] or state[1] ~= id then return {'other'} end
if state[2] and state[2] ~= spider then return {'spider', state[2]} end
if not state[2] then call('HSET', filter, 'crawl', spider, 'kept', newest) end
local last = call('HGET', workers, former .. ':number') or ''
if former ~= '' then
  if not tonumber(last) then
    call('HSET', workers, former .. ':back', 1)
  end
  local letter = call('HGET', workers, former .. ':dead')
  local member = letter and first_of(dead, letter)
  if member then move(dead, member, suspects, member) end
  call('HDEL', workers, former .. ':dead')
  if call('HEXISTS', workers, former .. ':stop') == 1 then
    call('HSET', workers, me .. ':stop', 1)
  end
  give_back(former, false)
end
call('HSET', workers, me, now + lease, me .. ':name', name, me .. ':lease', lease)
call('HSETNX', workers, me .. ':number', 0)
return {'ok', alive_but(me), call('ZCARD', pending), call('ZCARD', aside), state[3] or '',
        call('HGET', filter, 'kept') or newest, string.match(last, '%d*$')}
"""
)

# Arguments: id, worker. To be repeated until the reply says that no request is left to return.
LEAVE = (
    COMMON
    + r"""
local id, me = arg(), arg()
if call('HGET', filter, 'id') ~= id then return {'other'} end
local _, is_through = give_back(me, false)
if is_through then call('HDEL', workers, me .. ':number') end
return {'ok', is_through and 1 or 0, alive_but(me),
        call('ZCARD', pending) + call('ZCARD', suspects), call('HGET', filter, 'ended') or ''}
"""
)

# Makes requests pending again, some at a time. Argument: "aside" or "dead". Returns the number of
# requests that were moved, and how many are left.
REQUEUE = (
    COMMON
    + r"""
local from, number = arg() == 'dead' and dead or aside, 0
while may_move() do
  local member = call('ZRANGE', from, 0, 0)[1]
  if not member then break end
  call('HDEL', filter, 'ended')
  local place = deaths_at(member)
  local blameless = string.sub(member, 1, place - 1) .. '\0'
      .. string.sub(member, place + 1 + 16 * string.byte(member, place))
  move(from, member, pending, blameless)
  number = number + 1
end
return {number, call('ZCARD', from)}
"""
)

# Arguments: id, version, next version; the number of fields to remove, and their names; the number
# of fields to set, and their names and values.
CHANGE = (
    BASE
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
    BASE
    + r"""
local ours = 9
local id, sets = arg(), (#KEYS - ours) / 2
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
    BASE
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
    BASE
    + r"""
if call('HGET', filter, 'id') ~= arg() then return {'other'} end
call('UNLINK', unpack(KEYS))
return {'ok'}
"""
)


def keys_of(key: str) -> list[str]:
    """Return the keys of a filter and its queue in the order of the scripts, without blocks."""
    names = ["pending", "leased", "workers", "suspects", "dead", "aside", "downloading"]
    names += ["forgotten"]
    return [key, *(f"{{{key}}}:{name}" for name in names)]


def maker_key(key: str) -> str:
    """Return the name of the lock for making a generation."""
    return f"{{{key}}}:maker"


def block_keys(key: str, generation_id: str, number: int) -> list[str]:
    """Return the names of all keys of blocks of a generation."""
    return [block_key(key, generation_id, chunk) for chunk in range(number)]


def block_key(key: str, generation_id: str, chunk: int) -> str:
    """Return the name of a key of blocks."""
    return f"{{{key}}}:blocks:{generation_id}:{chunk}"
