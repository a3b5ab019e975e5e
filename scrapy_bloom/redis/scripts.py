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
    numbered                  the last number that was given to a row as its id or position
    crawl                     name of the spider whose queue it is
    run, run_name             id and name of the current run; no fields until a crawl has joined
    began                     when that run began, in ms since 1970
    kept                      number of the newest generation when the run began: requests recorded
                              from then on do not expire until the run has ended
    epoch                     raised when a run begins, or when a finished one tries again what has
                              failed or waits
    adds_tries                1 if what is tried again in this epoch has one try more, else 0
    tried_at                  when adds_tries was set last without a run's name, in ms since 1970
    start                     the worker that runs the spider's start(); "done" when it has ended
    start_at                  the value of `numbered` then: start requests of an earlier start() may
                              be replaced
    ended                     when the queue became empty, in ms since 1970
    last                      the slot from which a request was taken last
    crew                      the approximate number of workers
    look                      when to check for expired leases next, in ms

The hash `rows` has the rows. The id of a row has 8 bytes: the number with which it entered. A row
consists of

    its state                 one character: w (waiting), f (failed), d (dead) or p (any other)
    tries                     1 byte
    epoch                     4 bytes: of a failed or waiting row, else 0
    position                  8 bytes
    texts, each after its     flags (letters, `layout.FLAGS`); slot, NUL, priority (8 bytes), rank
    length in 4 bytes         (1); page; waits_for; reason; hops; the workers that died with it (16
                              each); records (`layout`); the request as it first entered, if it has
                              changed: slot, NUL, priority, rank, 1 if the newest comes first (1),
                              its data
    data                      the serialized request, to the end

where hops and records are such texts themselves. Whether a row is in flight, for example, is told
by the set that has it: sorted sets with scores 0, which are in the order of their members.

    pending, suspects         slot, NUL, priority (8), rank (1), position (8), id: in the order of
                              taking
    leased                    worker (16), token (8), id
    kept, last_tries          1 of a start request, else 0 (1); epoch (4), id
    waiting                   length of the page (4), page, epoch (4), id
    dead, unreadable          id
    open                      length of the page (4), page, id
    worklist                  page
    downloading               either slot, NUL, worker, token of a leased request that is not
                              downloaded yet, if its slot has a limit; or slot, NUL, worker, 255,
                              until when no other worker may take a request of the slot (7), and
                              how long that pause is (4), in ms

A row has its own page in `open` from when it is taken or has entered as new once in each run. Other
members of `open` may be out of date. The bits of a fingerprint are those that hash scheme 1 returns
(`filters.hashing`): the block hash (6), and positions in the block (2 each), at least as many as
the generation with the most hashes needs. The fields of `workers`:

    <worker>                  when its lease expires, in ms since 1970; without this field, its
                              requests belong to no worker
    <worker>:number           number of its last batch; "gone", that number and a time in ms when
                              the worker has lost its lease, or has rejoined: then its batches are
                              refused, and an hour later its fields are removed
    <worker>:answers          of that batch: 1 or 0 for each request that entered, whether it was
                              queued; a space; how many fingerprints were recorded
    <worker>:name             host:pid, for `info`
    <worker>:lease            how long its lease lasts, in ms, for `info`
    <worker>:done             how many requests it has finished, for `info`
    <worker>:suspect          token of the suspect that is leased to it
    <worker>:stop             set by `scrapy bloom stop`, which asks the worker to shut down
    <worker>:back             set when the worker has rejoined after it had lost its lease, so its
                              requests have not killed it
    <worker>:dead             id of the dead row that its death has made

Numbers are big-endian. A priority is stored as 2^63 - 1 - priority, a rank as rank + 128. In a
member, a position is n, or 2^53 - n where the newest comes first; n is the
value of `numbered` then. A token is the number of the batch in which a request was taken
(6 bytes), and its index in the batch (2): a worker uses it only once. The clock is the server's.

A script that fails half-way keeps what it has written. So a row is added to its new set before it
is removed from its old set, `pushed` is raised after a row was added, `done` before a row is
removed, and the number of a batch is written last. What is left of a row in a set is removed when
it is found.
"""

from scrapy_bloom.redis.layout import JOIN as JOIN_FIELDS
from scrapy_bloom.redis.layout import (
    JOIN_REPLY,
    KEYS,
    LEAVE_REPLY,
    SETS,
    lua_arguments,
    lua_flags,
    lua_keys,
    lua_reply,
)
from scrapy_bloom.redis.layout import LEAVE as LEAVE_FIELDS
from scrapy_bloom.redis.layout import MOVE as MOVE_FIELDS

# Blocks of 8 KiB per key. With the allocator's header, a key takes 1 MiB; with 128 blocks, it would
# take 1.25 MiB.
CHUNK_BLOCKS = 127
WORKER_BYTES = 16

# The beginning of all scripts.
BASE = r"""
local call = redis.call
"""

# The beginning of scripts that change the queue.
COMMON = (
    lua_keys()
    + lua_flags()
    + f"local SETS = {{{', '.join(SETS)}}}\n"
    + r"""
local QUEUED, WAITING, FAILED, DEAD = 'p', 'w', 'f', 'd'  -- states of a row
local MOST_DEATHS, MOST_TRIES, TRIES_MS = 3, 5, 3600000
"""
    + BASE
    + r"""
-- Functions are in tables: each local variable of which a function knows costs time in each script.
local queue = {}
local time = call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

-- Returns fields of the filter's hash by their names.
function queue.read_state(...)
  local values, state = call('HMGET', filter, ...), {}
  for index, name in ipairs({...}) do state[name] = values[index] or nil end
  state.epoch = tonumber(state.epoch) or 0
  return state
end

-- How many rows and bytes the script may still move, so that it takes no longer than 5 ms.
local moves, bytes = 100, 262144
function queue.may_move(spared)
  return moves > (spared or 0) and bytes > 0
end

function queue.first_of(key, prefix)
  return call('ZRANGEBYLEX', key, '[' .. prefix, '(' .. prefix .. '\255', 'LIMIT', 0, 1)[1]
end

-- Texts, each after its length.
function queue.prefixed(text)
  return struct.pack('>I4c0', #text, text)
end

function queue.packed_texts(list)
  local packed = {}
  for index, text in ipairs(list) do packed[index] = queue.prefixed(text) end
  return table.concat(packed)
end

function queue.parsed_texts(packed)
  local list, at = {}, 1
  while at <= #packed do
    list[#list + 1], at = struct.unpack('>I4c0', packed, at)
  end
  return list
end

-- Rows.

local ROW = '>c1BI4I8' .. string.rep('I4c0', 8)  -- without what it was at first, and data

function queue.parsed_row(id, packed)
  local row = {id = id, packed = packed}
  row.state, row.tries, row.epoch, row.position, row.flags, row.order, row.page, row.waits_for,
    row.reason, row.hops, row.died, row.records, row.at = struct.unpack(ROW, packed)
  return row
end

-- Reads what a row was at first, and its data, which may be large.
function queue.read_rest(row)
  if row.data then return end
  local at
  row.first, at = struct.unpack('>I4c0', row.packed, row.at)
  row.data = string.sub(row.packed, at)
end

function queue.packed_row(row)
  local packed = struct.pack(
    ROW, row.state, row.tries, row.epoch, row.position, #row.flags, row.flags, #row.order,
    row.order, #row.page, row.page, #row.waits_for, row.waits_for, #row.reason, row.reason,
    #row.hops, row.hops, #row.died, row.died, #row.records, row.records)
  if not row.data then return packed .. string.sub(row.packed, row.at) end
  return packed .. queue.prefixed(row.first) .. row.data
end

local gone, dropped = {}, {}  -- the ids of rows that were dropped; their members by set

-- Returns the row of a member of a set; nil if it is gone.
function queue.row_of(key, member)
  local id = string.sub(member, -8)
  local packed = not gone[id] and call('HGET', rows, id)
  moves = moves - 1
  if not packed then
    call('ZREM', key, member)
    return nil
  end
  local row = queue.parsed_row(id, packed)
  row.key, row.member = key, member
  bytes = bytes - #packed
  return row
end

local flags_of = setmetatable({}, {__index = function(known, text)
  local flags = {}
  for letter in string.gmatch(text, '.') do flags[letter] = true end
  known[text] = flags
  return flags
end})

function queue.has(row, flag)
  return flags_of[row.flags][flag]
end

function queue.set_flag(row, flag, is_set)
  row.flags = string.gsub(row.flags, flag, '') .. (is_set and flag or '')
end

-- Returns its own page, and hops.
function queue.pages_of(row)
  if not row.pages then
    row.pages = queue.parsed_texts(row.hops)
    if row.page ~= '' then table.insert(row.pages, 1, row.page) end
  end
  return row.pages
end

-- Gives rows numbers, and returns the last one.
function queue.next_number(count)
  return call('HINCRBY', filter, 'numbered', count)
end

-- Returns the member of a set, other than leased, that has a row.
function queue.member_of(key, row)
  if key == kept then
    return (queue.has(row, IS_START) and '\1' or '\0') .. struct.pack('>I4', row.epoch) .. row.id
  end
  if key ~= pending and key ~= suspects then return row.id end
  local position = queue.has(row, NEWEST_FIRST) and 2^53 - row.position or row.position
  return row.order .. struct.pack('>I8', position) .. row.id
end

-- Returns the beginning of the members of waiting that end with a page; those of an earlier epoch
-- are tried again.
function queue.waiting_for(page, epoch)
  return queue.prefixed(page) .. struct.pack('>I4', epoch)
end

function queue.page_member(page, row)
  return queue.prefixed(page) .. row.id
end

function queue.index(row, page)
  call('ZADD', open, 0, queue.page_member(page, row))
end

function queue.unindex(row, pages)
  for _, page in ipairs(pages) do call('ZREM', open, queue.page_member(page, row)) end
end

-- Stores a row that has changed, and moves it to another set.
function queue.put(row, key)
  local member = queue.member_of(key, row)
  call('HSET', rows, row.id, queue.packed_row(row))
  call('ZADD', key, 0, member)
  if row.key then call('ZREM', row.key, row.member) end
  row.key, row.member = key, member
end

-- Removes what only a failed or waiting row has.
function queue.unkeep(row)
  if row.key ~= kept then return end
  call('ZREM', last_tries, row.member)
  if row.state == WAITING then
    call('ZREM', waiting, queue.waiting_for(row.waits_for, row.epoch) .. row.id)
  end
end

function queue.add_dropped(key, member)
  dropped[key] = dropped[key] or {}
  table.insert(dropped[key], member)
end

-- Drops a row, once `drop_now` is called.
function queue.drop(row)
  if gone[row.id] then return end
  gone[row.id] = true
  queue.unkeep(row)
  queue.add_dropped(rows, row.id)
  for _, page in ipairs(queue.pages_of(row)) do
    queue.add_dropped(open, queue.page_member(page, row))
  end
  queue.add_dropped(row.key, row.member)
end

-- The sets that have the rows come last, so that nothing stays in the hash alone.
function queue.drop_now()
  if not dropped[rows] then return end
  call('HINCRBY', filter, 'done', #dropped[rows])
  call('HDEL', rows, unpack(dropped[rows]))
  for key, members in pairs(dropped) do
    if key ~= rows then call('ZREM', key, unpack(members)) end
  end
  dropped = {}
end

-- Makes a row pending as it first entered, or dead.
function queue.try_again(row, tries)
  queue.read_rest(row)
  queue.unkeep(row)
  queue.unindex(row, queue.parsed_texts(row.hops))
  local first = row.first
  if first ~= '' then
    local ends = string.find(first, '\0', 1, true) + 9
    row.order, row.first, row.data = string.sub(first, 1, ends), '', string.sub(first, ends + 2)
    queue.set_flag(row, NEWEST_FIRST, string.byte(first, ends + 1) == 1)
  end
  row.tries, row.epoch, row.waits_for = tries, 0, ''
  if tries < MOST_TRIES then row.reason = '' end
  row.hops, row.died, row.records, row.pages = '', '', '', nil
  row.position = queue.next_number(1)
  row.state = tries < MOST_TRIES and QUEUED or DEAD
  queue.put(row, row.state == DEAD and dead or pending)
end

function queue.deaths_of(row)
  local died = 0
  for at = 1, #row.died, 16 do
    if call('HEXISTS', workers, string.sub(row.died, at, at + 15) .. ':back') == 0 then
      died = died + 1
    end
  end
  return died
end

-- How many failed and waiting rows are about to become pending: those of an earlier epoch.
function queue.count_late(key, epoch)
  local ends = struct.pack('>I4', epoch)
  return call('ZLEXCOUNT', key, '-', '(\0' .. ends) + call('ZLEXCOUNT', key, '[\1', '(\1' .. ends)
end

-- Makes the requests of a worker pending again, but one that has killed it alone dead. Returns the
-- number of the pending ones, and whether no more are left.
-- If there are too many for one script, the next check for expired leases finds the rest.
function queue.give_back(worker, is_blamed, died)
  local last = call('HGET', workers, worker .. ':number')
  if tonumber(last) then
    call('HSET', workers, worker .. ':number', string.format('gone %s %.0f', last, now))
  end
  if not is_blamed then call('HDEL', workers, worker) end
  if call('HGET', filter, 'start') == worker then call('HDEL', filter, 'start') end
  local suspect, given = is_blamed and call('HGET', workers, worker .. ':suspect'), 0
  while queue.may_move() do
    local entry = queue.first_of(leased, worker)
    if not entry then
      call('HDEL', workers, worker, worker .. ':name', worker .. ':suspect', worker .. ':done',
           worker .. ':lease', worker .. ':answers')
      -- If it has only been away, it shall end when it is back.
      if not is_blamed then call('HDEL', workers, worker .. ':stop') end
      return given, true
    end
    local row = queue.row_of(leased, entry)
    if row and suspect and suspect == string.sub(entry, 17, 24) then
      row.state = DEAD
      call('HSET', workers, worker .. ':dead', row.id)
      queue.put(row, dead)
      queue.read_rest(row)
      died[#died + 1] = row.data
    elseif row then
      row.state = QUEUED
      queue.set_flag(row, WAS_TAKEN, true)
      if is_blamed and not suspect and #row.died < 4080 then row.died = row.died .. worker end
      queue.put(row, queue.deaths_of(row) < MOST_DEATHS and pending or suspects)
      given = given + 1
    end
  end
  return given, false
end

function queue.note_start()
  call('HSET', filter, 'start_at', call('HGET', filter, 'numbered') or 0)
end

function queue.alive_but(worker)
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
local state = queue.read_state('id', 'crawl', 'run', 'run_name', 'began', 'epoch', 'tried_at')
if state.id ~= given.id then return {'other'} end
if state.crawl and state.crawl ~= given.spider then return {'spider', state.crawl} end
call('HSETNX', filter, 'crawl', given.spider)

local function begin_epoch()
  local since, adds = now - (tonumber(state.tried_at) or -TRIES_MS), 1
  if given.run_name == '' and since >= 0 and since < TRIES_MS then
    adds = 0
  elseif given.run_name == '' then
    call('HSET', filter, 'tried_at', now)
  end
  state.epoch = state.epoch + 1
  call('HSET', filter, 'epoch', state.epoch, 'adds_tries', adds)
end

local function is_idle()
  for _, key in ipairs({pending, leased, suspects, unreadable}) do
    if call('ZCARD', key) > 0 then return false end
  end
  return queue.count_late(kept, state.epoch) == 0
end

local is_late, begins = false, given.is_crawl and not state.run
if given.is_crawl and state.run and state.run ~= given.run and state.run_name ~= given.run_name then
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
  begin_epoch()
  call('HDEL', filter, 'start', 'ended')
  call('HSET', filter, 'run', given.run, 'run_name', given.run_name, 'began', began,
       'kept', given.newest)
elseif given.is_crawl and former == '' and given.run_name == '' and queue.alive_but(me) == 0
    and call('HEXISTS', workers, me) == 0 and is_idle() then  -- else, the reply was lost
  begin_epoch()
  if call('ZCARD', kept) > 0 then call('HDEL', filter, 'ended') end
end

local last = ''
if former ~= '' then
  last = call('HGET', workers, former .. ':number') or ''
  if not tonumber(last) then call('HSET', workers, former .. ':back', 1) end
  local id = call('HGET', workers, former .. ':dead')
  local row = id and call('ZSCORE', dead, id) and queue.row_of(dead, id)
  if row then
    row.state = QUEUED
    queue.put(row, suspects)
  end
  call('HDEL', workers, former .. ':dead')
  if call('HEXISTS', workers, former .. ':stop') == 1 then
    call('HSET', workers, me .. ':stop', 1)
  end
  queue.give_back(former, false)
end
call('HSET', workers, me, now + given.lease, me .. ':name', given.name,
     me .. ':lease', given.lease)
call('HSETNX', workers, me .. ':number', 0)
local start = call('HGET', filter, 'start')
if former == '' and (not start or start == 'done') then queue.note_start() end

local late, number_waiting = queue.count_late(kept, state.epoch), call('ZCARD', waiting)
state = queue.read_state('run', 'run_name', 'began', 'kept', 'epoch', 'adds_tries',
                         'ended')
if state.adds_tries ~= '0' then late = late - queue.count_late(last_tries, state.epoch) end
return replied({
  run = state.run or '', run_name = state.run_name or '', began = state.began or '',
  kept = state.kept or given.newest, is_late = is_late,
  earlier = call('HLEN', runs), others = queue.alive_but(me),
  pending = call('ZCARD', pending), in_flight = call('ZCARD', leased),
  suspect = call('ZCARD', suspects), waiting = number_waiting,
  failed = call('ZCARD', kept) - number_waiting, dead = call('ZCARD', dead),
  unreadable = call('ZCARD', unreadable), retried = late, ended = state.ended or '',
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
local _, is_through = queue.give_back(me, false)
if is_through then call('HDEL', workers, me .. ':number') end
local others = queue.alive_but(me)
local number = call('ZCARD', pending) + call('ZCARD', suspects) + call('ZCARD', leased)
if is_through and others + number == 0 then call('UNLINK', workers, downloading) end
return replied({is_through = is_through, others = others,
                ended = call('HGET', filter, 'ended') or ''})
"""
)

# Makes rows pending as they first entered, with no tries, or drops them, some at a time. Unreadable
# ones become pending as they are. Returns the number of rows that were moved, and the next value of
# `first`; '' if there are no more.
MOVE = (
    COMMON
    + lua_arguments(MOVE_FIELDS)
    + r"""
local sets = {pending = pending, kept = kept, dead = dead, unreadable = unreadable}
local from, number, next_one = sets[given.from], 0, given.first

local function is_meant(row)
  local is_of_slot = string.sub(row.order, 1, #given.slot + 1) == given.slot .. '\0'
  return row.state ~= WAITING and (is_of_slot or not given.has_slot)
end

local function move(row)
  if given.to == '' then
    queue.drop(row)
  elseif from == unreadable then
    queue.put(row, pending)
  else
    queue.try_again(row, 0)
  end
end

while queue.may_move() do
  local member = call('ZRANGEBYLEX', from, next_one, given.last, 'LIMIT', 0, 1)[1]
  if not member then
    next_one = ''
    break
  end
  next_one = '(' .. member
  local row = queue.row_of(from, member)
  if row and is_meant(row) then
    move(row)
    number = number + 1
  end
end
queue.drop_now()
if given.to ~= '' and number > 0 then call('HDEL', filter, 'ended') end
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

# Keys: those of all scripts; then temporary sets and hashes, and their final names. Arguments: id
# of a new filter; how many members each of these must have; the number of the filter's fields, and
# these fields. Nothing is changed if the filter exists. Until its hash is written, they expire.
CREATE = (
    _WORDS
    + r"""
local id, ours = arg(), """
    + str(len(KEYS))
    + r"""
local sets, rows = (#KEYS - ours) / 2, KEYS[2]
local found = call('HGET', filter, 'id')
if found then return {found == id and 'ok' or 'other'} end  -- our id: the reply was lost
local numbers = {}
for index = 1, sets do
  numbers[index] = number()
  local count = KEYS[ours + sets + index] == rows and 'HLEN' or 'ZCARD'
  if call(count, KEYS[ours + index]) ~= numbers[index] then return {'lost'} end
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
    return f"{blocks_prefix(key, generation_id)}{chunk}"


def blocks_prefix(key: str, generation_id: str) -> str:
    """Return the beginning of the names of the keys of blocks of a generation."""
    return f"{{{key}}}:blocks:{generation_id}:"
