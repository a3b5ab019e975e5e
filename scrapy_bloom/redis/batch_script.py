"""The script that applies a batch to a filter and its queue; see `scrapy_bloom.redis.scripts`."""

from scrapy_bloom.redis.scripts import BASE, MOVES

# id, version, worker (or mirror, or ''), number, lease in ms (of a mirror, 1 if this feeds it, else
# 0: the number is that of the batch before); generations: how many, the number of
# the newest, and of each, newest first: id, hashes, blocks; requests found: how many, and of each:
# kind, order, fingerprint, bits, data; fingerprints to forget, tokens done, tokens set aside: how
# many, and these; how many to take, 1 by slots, slots and downloads: how many, and these; 1 to take
# a suspect although the worker has other requests, 1 to take none; 1 to run start(), 1 if start()
# is through, 1 if the crawl is over. Without a worker, nothing follows what to forget.
#
# A kind is "n": filtered, "u": queued whatever the filter says, "?": filtered and not recorded;
# then "1": newest first, or "0". An order is what a member begins with, up to its position; '' if
# it is only recorded. Bits are a block for each generation (4 bytes), then as many positions as the
# most of them need (2 bytes each). An answer is "n": new, "f": forgotten, so new once more, or the
# place in the list of generations of one that has it, as a character. A batch whose reply was lost
# is answered without these.
#
# A crawl without this queue is no worker. Its batches are numbered as well if they feed a mirror:
# so it learns that the server has lost some.
_FILTER = r"""
local id, version, me, batch, lease = arg(), arg(), arg(), number(), number()
local has_queue, has_mirror = #me == 16, me ~= '' and #me < 16
local number_of_generations, newest_count = number(), 'count:' .. arg()
local state = call('HMGET', filter, 'id', 'version', 'pushed', 'done', 'forgets', newest_count,
                   'mirror:' .. me)
if not state[1] or state[1] ~= id then return {'other', state[1]} end
local is_retry, is_numbered = false, false
if has_queue then
  local last = tonumber(call('HGET', workers, me .. ':number'))
  if not last or batch > last + 1 then return {'back'} end
  if batch < last then return {'old'} end
  is_retry = batch == last
  local entries = call('ZCARD', pending) + call('ZCARD', leased) + call('ZCARD', suspects)
      + call('ZCARD', dead) + call('ZCARD', aside)
  if entries < (tonumber(state[3]) or 0) - (tonumber(state[4]) or 0) then return {'lost'} end
elseif has_mirror then
  local last = tonumber(string.match(state[7] or '0', '^%d+'))
  is_numbered = lease == 1
  if batch ~= last and not (is_numbered and batch == last + 1) then return {'back'} end
end
if state[2] ~= version and not is_retry then return {'version', state[2]} end

local generations, answers, died, expired = {}, {}, {}, {}
local counts = {state[5], state[6]}

local function taken_by_this()
  local numbered = me .. struct.pack('>I6', batch)
  return call('ZRANGEBYLEX', leased, '[' .. numbered, '(' .. numbered .. '\255')
end

local function reply(entries)
  if is_numbered then call('HSET', filter, 'mirror:' .. me, batch .. ' ' .. time[1]) end
  if not has_queue then return {'ok', table.concat(answers), counts} end
  call('HSET', workers, me, now + lease, me .. ':number', batch)
  state = call('HMGET', filter, 'pushed', 'done', 'start', 'ended')
  local waiting = call('ZCARD', pending)
  return {'ok', table.concat(answers), counts,
          entries, state[3] or '', waiting + call('ZCARD', suspects) + call('ZCARD', leased),
          waiting, held_by(me), state[1] or '0', state[2] or '0', state[4] or '', died, expired,
          call('HEXISTS', workers, me .. ':suspect')}
end

if is_retry then return reply(taken_by_this()) end

if has_mirror and not state[7] then  -- a new one: remove those of crawls that were killed
  local fields = call('HGETALL', filter)
  for index = 1, #fields, 2 do
    local last_used = string.match(fields[index + 1], '^%d+ (%d+)$')
    if string.sub(fields[index], 1, 7) == 'mirror:' and last_used
        and time[1] - last_used > 604800 then
      call('HDEL', filter, fields[index])
    end
  end
end

for index = 1, number_of_generations do
  generations[index] = {id = arg(), hashes = number(), blocks = number()}
end
local blocks_key = '{' .. filter .. '}:blocks:'
local whole = {}

-- The key of a generation's bits, and where its block begins there; nil if the key was lost. A key
-- has 127 blocks (CHUNK_BLOCKS).
local function place_of(index, bits)
  local generation, block = generations[index], struct.unpack('>I4', bits, 4 * index - 3)
  local chunk = math.floor(block / 127)
  local key = blocks_key .. generation.id .. ':' .. chunk
  if whole[key] == nil then
    local size = math.min(127, generation.blocks - 127 * chunk) * 8192
    whole[key] = call('STRLEN', key) == size
  end
  if not whole[key] then return nil end
  return key, block % 127 * 65536
end

-- Whether one of the bits of a fingerprint is not set.
local function has_clear(key, base, bits, hashes)
  local from = 4 * #generations + 1
  for index = 0, hashes - 1 do
    local bit = base + struct.unpack('>H', bits, from + 2 * index)
    if call('GETBIT', key, bit) == 0 then return true end
  end
  return false
end

local bitfield = {}
for index = 1, 4 * (generations[1] and generations[1].hashes or 0), 4 do
  bitfield[index], bitfield[index + 1], bitfield[index + 3] = 'SET', 'u1', '1'
end

-- Sets the bits of a fingerprint in the newest generation, by one command: each takes its time.
local function record(key, base, bits)
  local from = 4 * #generations + 1
  for index = 0, generations[1].hashes - 1 do
    bitfield[4 * index + 3] = base + struct.unpack('>H', bits, from + 2 * index)
  end
  call('BITFIELD', key, unpack(bitfield))
end

local pushed = tonumber(state[3]) or 0
local function enqueue(order, newest_first, data)
  local position = pushed + 1
  if newest_first then position = 2^53 - position end
  call('ZADD', pending, 0, order .. struct.pack('>I8', position) .. '\0' .. data)
  pushed = call('HINCRBY', filter, 'pushed', 1)
end

local any_forgotten = call('EXISTS', forgotten) == 1
for index = 1, number() do
  local kind, order, fingerprint, bits, data = arg(), arg(), arg(), arg(), arg()
  local answer, has_bits, key, base = 'n', false, nil, nil
  if bits ~= '' then
    for place = #generations, 1, -1 do  -- the newest last
      key, base = place_of(place, bits)
      if not key then return {'lost'} end
      if not has_clear(key, base, bits, generations[place].hashes) then
        answer, has_bits = string.char(place), true
      end
    end
    if any_forgotten and call('ZSCORE', forgotten, fingerprint) then answer = 'f' end
  end
  local is_new, what = answer == 'n' or answer == 'f', string.sub(kind, 1, 1)
  if order ~= '' and (is_new or what == 'u') then
    enqueue(order, string.sub(kind, 2, 2) == '1', data)
  end
  if bits ~= '' and is_new and what ~= '?' then
    if not has_bits then
      record(key, base, bits)
      counts[2] = call('HINCRBY', filter, newest_count, 1)
    end
    -- What is new is not forgotten any more.
    if answer == 'f' then call('ZREM', forgotten, fingerprint) end
  end
  answers[index] = answer
end

local number_forgotten = number()
for _ = 1, number_forgotten do call('ZADD', forgotten, now / 1000, arg()) end
if number_forgotten > 0 then counts[1] = call('HINCRBY', filter, 'forgets', 1) end
if not has_queue then return reply() end
"""

_LEASES = r"""
for _ = 1, number() do
  local token = arg()
  local entry = me .. token
  if call('ZLEXCOUNT', leased, '[' .. entry, '(' .. entry .. '\255') > 0 then
    call('HINCRBY', filter, 'done', 1)
    call('ZREMRANGEBYLEX', leased, '[' .. entry, '(' .. entry .. '\255')
    if call('HGET', workers, me .. ':suspect') == token then
      call('HDEL', workers, me .. ':suspect')
    end
  end
end
for _ = 1, number() do
  local entry = first_of(leased, me .. arg())
  if entry then move(leased, entry, aside, string.sub(entry, 25)) end
end

-- Returns what is leased to nobody: the worker has left, or joined again, or was lost.
local function return_orphans(known)
  table.sort(known)
  local from = '-'
  for index = 1, #known + 1 do
    local to = known[index] and '(' .. known[index] or '+'
    while may_move() do
      local entry = call('ZRANGEBYLEX', leased, from, to, 'LIMIT', 0, 1)[1]
      if not entry then break end
      give_back(string.sub(entry, 1, 16), false)
    end
    from = '(' .. (known[index] or '') .. '\255'
  end
  local start = call('HGET', filter, 'start')
  if start and start ~= 'done' and call('HEXISTS', workers, start) == 0 then
    call('HDEL', filter, 'start')
  end
end

local function return_expired()
  local known, all = {}, call('HGETALL', workers)
  local is_empty = call('ZCARD', pending) + call('ZCARD', leased) + call('ZCARD', suspects) == 0
  for index = 1, #all, 2 do
    local name, ends = all[index], tonumber(all[index + 1])
    if #name == 16 then
      known[#known + 1] = name
      if ends > now + lease then  -- the clock went back
        call('HSET', workers, name, now + lease)
      elseif ends < now and name ~= me then
        expired[#expired + 1] = call('HGET', workers, name .. ':name') or '?'
        expired[#expired + 1] = give_back(name, true, died)
      end
    elseif is_empty and string.sub(name, 17) == ':back' then
      call('HDEL', workers, name)  -- nothing is left that it could be blamed for
    end
  end
  return_orphans(known)
  return may_move() and now + math.min(1000, lease / 4) or now
end

local lasts_until = tonumber(call('HGET', workers, me))
local look = tonumber(call('HGET', filter, 'look'))
if not lasts_until or lasts_until < now then
  -- All may have stood still, as when the server was away: let the others renew theirs first.
  call('HSET', filter, 'look', now + lease)
elseif not look or look <= now or look > now + lease then
  call('HSET', filter, 'look', return_expired())
end
"""

_TAKE = r"""
local want, by_slot, busy = number(), arg() == '1', {}
for _ = 1, number() do
  local slot = arg()
  busy[slot] = number()
end
local stands_still, has_others, may_start, start_ended, is_over =
  arg() == '1', arg() == '1', arg() == '1', arg() == '1', arg() == '1'

local entries = taken_by_this()  -- which has failed half-way before
local taken = #entries
local function take(from, member)
  local token = struct.pack('>I6', batch) .. struct.pack('>H', taken)
  local entry = me .. token .. member
  taken = taken + 1
  entries[#entries + 1] = entry
  if from == suspects then
    call('ZADD', leased, 0, entry)
    call('HSET', workers, me .. ':suspect', token)
  end
  move(from, member, leased, entry)
end

local slots_to_read, bytes_to_read = 100, 262144  -- whole requests, to know their slots
local function slot_after(slot)
  local member = call('ZRANGEBYLEX', pending, '(' .. slot .. '\1', '+', 'LIMIT', 0, 1)[1]
      or call('ZRANGE', pending, 0, 0)[1]
  if not member then return nil end
  slots_to_read, bytes_to_read = slots_to_read - 1, bytes_to_read - #member
  return string.sub(member, 1, string.find(member, '\0', 1, true) - 1), member
end

-- The places of the slots in turn, from the one after that which was served last, by the number of
-- their downloads; not more of them than may be served. Also the first request of each.
local function slots_in_turn()
  local slots, firsts, levels, highest, idle = {}, {}, {}, 0, want - taken
  local slot, member = slot_after(call('HGET', filter, 'last') or '')
  while slot and slot ~= slots[1] do
    slots[#slots + 1], firsts[#slots + 1] = slot, member
    local level = busy[slot] or 0
    levels[level] = levels[level] or {}
    table.insert(levels[level], #slots)
    highest = math.max(highest, level)
    if level == 0 then idle = idle - 1 end
    if idle <= 0 or slots_to_read <= 0 or bytes_to_read <= 0 then break end
    slot, member = slot_after(slot)
  end
  return slots, firsts, levels, highest
end

-- Of the slots with the fewest downloads, always the one after that which was served last.
local function take_by_slot()
  local slots, firsts, levels, highest = slots_in_turn()
  local level, last = 0, 0
  while level <= highest do
    local places = levels[level] or {}
    table.sort(places, function(a, b)
      if (a > last) ~= (b > last) then return a > last end
      return a < b
    end)
    for _, place in ipairs(places) do
      if taken >= want or not may_move() then break end
      -- A priority may begin with bytes of 255, which `first_of` takes for the end.
      local from, to = '[' .. slots[place] .. '\0', '(' .. slots[place] .. '\1'
      local member = firsts[place] or call('ZRANGEBYLEX', pending, from, to, 'LIMIT', 0, 1)[1]
      if member then
        take(pending, member)
        firsts[place] = nil
        last, highest = place, math.max(highest, level + 1)
        levels[level + 1] = levels[level + 1] or {}
        table.insert(levels[level + 1], place)
      end
    end
    if taken >= want or not may_move() then break end
    level = level + 1
  end
  if last > 0 then call('HSET', filter, 'last', slots[last]) end
end

if want > taken and not call('HGET', workers, me .. ':suspect') then
  if by_slot then
    take_by_slot()
  else
    while taken < want and may_move() do
      local member = call('ZRANGE', pending, 0, 0)[1]
      if not member then break end
      take(pending, member)
    end
  end
  if call('ZCARD', pending) == 0 and taken == 0 and not has_others
      and (stands_still or held_by(me) == 0) then
    local member = call('ZRANGE', suspects, 0, 0)[1]
    if member then
      -- Perhaps some of the workers came back that seemed to have died of it.
      if deaths_of(member) >= MOST_DEATHS then
        take(suspects, member)
      else
        move(suspects, member, pending, member)
      end
    end
  end
end

local start = call('HGET', filter, 'start')
if start_ended and start == me then
  start = 'done'
  call('HSET', filter, 'start', start)
elseif may_start and not start then
  call('HSET', filter, 'start', me)
end
local left = call('ZCARD', pending) + call('ZCARD', suspects) + call('ZCARD', leased)
if left > 0 or start ~= 'done' then
  call('HDEL', filter, 'ended')
elseif is_over then
  call('HSETNX', filter, 'ended', now)
end
return reply(entries)
"""

RECORD = BASE + _FILTER  # without a worker
BATCH = BASE + MOVES + _FILTER + _LEASES + _TAKE
