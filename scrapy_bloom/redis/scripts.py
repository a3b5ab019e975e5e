"""The steps of a filter and a queue in Redis or Valkey, each one atomic Lua script.

All keys of a filter `<key>` are in one slot of a Cluster:

    <key>                     a hash
      id                        random: another one is another filter, with another queue
      filter                    JSON: salt, fingerprinter, spider, ...
      version                   changes with the generations
      gen:<n>                   JSON: generation n: id, geometry, capacity, error rate, times
      count:<n>                 requests recorded in it
      persist:<id>              number of keys of a new generation that still expire; whoever reads
                                this makes them permanent, and removes this field
      unlink:<id>               number of keys of an expired generation; whoever reads this removes
                                them, and then this field
      mirror:<name>             of a crawl without this queue: number of its last batch, and when in
                                seconds; without it, its batches are refused
      forgets                   how often fingerprints were forgotten
      pushed, done              how many requests entered the queue, and left it, ever
      start                     the worker that runs the spider's start(); "done" when it is through
      crawl                     name of the spider whose queue it is
      kept                      number of the generation that was the newest when the queue began:
                                what is recorded from there on does not expire until the crawl ends
      ended                     when nothing was left of the crawl, in ms since 1970
      last                      the slot that was served last
      crew                      how many workers there are, about
      look                      when to look for expired leases next, in ms
    {<key>}:blocks:<id>:<c>   the blocks of a generation, 127 to a key, as they are in a file; they
                              expire in an hour until the generation is in the hash
    {<key>}:maker             a string: who makes a generation at the moment; it expires in a minute
    {<key>}:forgotten         a sorted set: fingerprints, by the time of forgetting in seconds
    {<key>}:pending           a sorted set whose scores are all 0, in the order of its members:
                              slot, NUL, priority (8 bytes), rank (1), position (8), number of
                              deaths (1), the workers that died of it (16 each), the request
    {<key>}:suspects          likewise: three workers died of each; handed out alone
    {<key>}:dead              likewise: so did the worker that had it alone
    {<key>}:aside             likewise: what no worker of this run can make a request of
    {<key>}:leased            likewise: worker (16), token (8), the member as it was pending
    {<key>}:downloading       a sorted set whose scores are all 0: slot, NUL, worker, token of each
                              leased request of a slot with a limit until it is downloaded; or slot,
                              NUL, worker, 255, and until when no other worker may have a request
                              of the slot (7 bytes), in ms
    {<key>}:slots             a hash, with BLOOM_MAX_PAGES_PER_SLOT: how many requests of each slot
                              were ever queued
    {<key>}:workers           a hash
      <worker>                  until when its lease lasts, in ms since 1970; without it, what the
                                worker still has is leased to nobody
      <worker>:number           of its last batch; "gone" stands before it once the worker has
                                lost its lease, or joined again; then its batches are refused
      <worker>:name             host:pid, for people
      <worker>:lease            how long its lease is, in ms, for people
      <worker>:done             how many requests it has finished, for people
      <worker>:suspect          token of the suspect that it has
      <worker>:stop             `scrapy bloom stop` asks it to end
      <worker>:back             it came back: what it had is not blamed for its death
      <worker>:dead             what the dead letter begins with that its death has made

Numbers are big-endian. A priority is 2^63 - 1 less its value, a rank 128 more. A position is n, or
2^53 - n where the newest comes first; n counts what was pushed. A token is the number of the batch
in which a request was taken (6 bytes), and its index there (2): no worker uses it again. The clock
is the server's.

A script that fails half-way keeps what it has written. So a request is where it goes before it
leaves where it was, `pushed` is counted after that and `done` before, and the number of a batch is
written last.
"""

# Of 8 KiB in one key. With the allocator's header it has 1 MiB; with 128 it would take 1.25.
CHUNK_BLOCKS = 127
WORKER_BYTES, TOKEN_BYTES = 16, 8

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

MOVES = r"""
local pending, leased, workers = KEYS[2], KEYS[3], KEYS[4]
local suspects, dead, aside, downloading = KEYS[5], KEYS[6], KEYS[7], KEYS[8]
local MOST_DEATHS = 3
local time = call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

-- What a script may still move, so that it takes no longer than 5 ms: a further request, and bytes.
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

local function count_leased(worker)
  return call('ZLEXCOUNT', leased, '[' .. worker, '(' .. worker .. '\255')
end

-- Where the number of deaths is in a member.
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

-- What a worker had is pending again: how much of it, and whether that is all. What was too much
-- for one script is found by the next look for expired leases.
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

COMMON = BASE + MOVES

# id, worker, its name, the spider's, lease in ms, the worker's former self or '', the number of the
# newest generation, 1 if this shard has start(). It may be sent again. The answer ends with the
# number of the last batch of the former self that this server knows; '' if it does not know it.
JOIN = (
    COMMON
    + r"""
local id, me, name, spider, lease, former, newest, has_start =
  arg(), arg(), arg(), arg(), number(), arg(), arg(), arg() == '1'
local state = call('HMGET', filter, 'id', 'crawl', 'ended')
if not state[1] or state[1] ~= id then return {'other', state[1]} end
if state[2] and state[2] ~= spider then return {'spider', state[2]} end
if not state[2] then
  if not has_start then call('HSET', filter, 'start', 'done') end
  call('HSET', filter, 'crawl', spider, 'kept', newest)
end
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

# id, worker. It may have to be sent again, until it says that nothing is left.
LEAVE = (
    COMMON
    + r"""
local id, me = arg(), arg()
if call('HGET', filter, 'id') ~= id then return {'other'} end
local _, is_through = give_back(me, false)
if is_through then call('HDEL', workers, me .. ':number') end
return {'ok', is_through and 1 or 0, alive_but(me),
        call('ZCARD', pending) + call('ZCARD', suspects), call('ZCARD', aside),
        call('HGET', filter, 'ended') or ''}
"""
)

# id; the key's last word: "aside" or "dead". What is there is pending again, some at a time.
REQUEUE = (
    COMMON
    + r"""
local id, from = arg(), arg() == 'dead' and dead or aside
if call('HGET', filter, 'id') ~= id then return {'other'} end
local number = 0
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
return {'ok', number, call('ZCARD', from)}
"""
)

# id, version, next version; names of fields to remove, and fields to set: how many, and these.
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

# Keys: as all scripts have them; then temporary sets, and the names that they get. Arguments: id of
# a new filter; how many members each set must have; the filter's fields: how many, and these.
# Nothing is changed if there is a filter. Until the hash is there, the sets expire, and those of an
# earlier filter belong to none.
CREATE = (
    BASE
    + r"""
local ours = 10
local id, sets = arg(), (#KEYS - ours) / 2
local there = call('HGET', filter, 'id')
if there then return {there == id and 'ok' or 'other'} end  -- ours: the reply was lost
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

# Keys of blocks. Arguments: seconds until they expire; the length of each in bytes. A key that is
# there is not changed, since a copy of this call may arrive late; but the write to it fails if the
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

# id. Removes a filter, and its queue, at once; its blocks are left to the caller.
REMOVE = (
    COMMON
    + r"""
if call('HGET', filter, 'id') ~= arg() then return {'other'} end
call('UNLINK', unpack(KEYS))
return {'ok'}
"""
)


def keys_of(key: str) -> list[str]:
    """Return the keys of a filter and its queue, as the scripts take them; not those of blocks."""
    names = ["pending", "leased", "workers", "suspects", "dead", "aside", "downloading"]
    names += ["slots", "forgotten"]
    return [key, *(f"{_tag(key)}:{name}" for name in names)]


def maker_key(key: str) -> str:
    """Return the name of the lock of whoever makes a generation."""
    return f"{_tag(key)}:maker"


def _tag(key: str) -> str:
    return key if key.startswith("{") else f"{{{key}}}"


def block_key(key: str, generation_id: str, chunk: int) -> str:
    """Return the name of a key of blocks. Those of a filter that was set aside keep theirs."""
    tag = key[1:].partition("}")[0] if key.startswith("{") else key
    return f"{{{tag}}}:blocks:{generation_id}:{chunk}"
