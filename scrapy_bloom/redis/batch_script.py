"""Lua scripts that apply a batch to a filter and its queue, or to a filter alone.

`scrapy_bloom.redis.scripts` documents the stored fields and the layout of a member.
"""

from scrapy_bloom.redis.scripts import BASE, COMMON

# Arguments before the fingerprints of a batch: 1 if there is a time window, the number of
# generations, and the number of hashes of each, oldest first. A fingerprint is followed by its
# positions in a block (2 bytes each, as many as the generation with the most hashes needs), and for
# each generation by the key of its block, the length of that key in bytes, and the first bit of the
# block in the key.
#
# The answer to a fingerprint is "n" (new), "f" (forgotten, so new once more), or the place of a
# generation that has the fingerprint, as a character.
_BITS = r"""
local any_forgotten = call('EXISTS', forgotten) == 1
local has_window, hashes, most = arg() == '1', {}, 0
for place = 1, number() do
  hashes[place] = number()
  most = math.max(most, hashes[place])
end
local layout = '>' .. string.rep('H', most)
local whole, words, recorded = {}, {}, 0

-- About the fingerprint that was read last; key and first bit are of the newest generation.
local fingerprint, positions, key, first, is_set

local function has_all(hashes)
  for index = 1, hashes do
    if call('GETBIT', key, first + positions[index]) == 0 then return false end
  end
  return true
end

-- Reads a fingerprint and its positions ('' for no fingerprint), and returns the answer, or nil if
-- a key was lost.
local function look_up()
  local answer, length, packed = 'n', nil, nil
  fingerprint, packed, is_set = arg(), arg(), false
  if packed == '' then
    is_set = true
    return answer
  end
  positions = {struct.unpack(layout, packed)}
  for place, hashes in ipairs(hashes) do
    key, length, first = arg(), number(), number()
    if whole[key] == nil then whole[key] = call('STRLEN', key) == length end
    if not whole[key] then return nil end
    if has_all(hashes) then answer, is_set = string.char(place), true end
  end
  if any_forgotten and call('ZSCORE', forgotten, fingerprint) then
    answer = 'f'
    -- An older generation expires first, so the newest one has to record the request, too.
    if has_window then is_set = has_all(hashes[#hashes]) end
  end
  return answer
end

-- Sets the bits by one command, because each command takes time. Removes a new fingerprint from the
-- forgotten set.
local function record(answer)
  if not is_set then
    local last = 4 * hashes[#hashes]
    for index = 4, last, 4 do
      words[index - 3], words[index - 2], words[index] = 'SET', 'u1', '1'
      words[index - 1] = first + positions[index / 4]
    end
    call('BITFIELD', key, unpack(words, 1, last))
    recorded = recorded + 1
  end
  if answer == 'f' then call('ZREM', forgotten, fingerprint) end
end
"""

# Arguments: the key of the forgotten set, id, version, the field of the newest generation's count,
# the field of the mirror ('' without a mirror), the number of the batch, the new value of the
# mirror's field (number and time in seconds; '' if this batch does not feed the mirror, and has the
# number of the batch before), 1 to record the fingerprints; the generations; fingerprints.
_RECORD = r"""
local forgotten, id, version, count_field, mirror, batch, mirror_value, records =
  arg(), arg(), arg(), arg(), arg(), number(), arg(), arg() == '1'
local state = call('HMGET', filter, 'id', 'version', 'forgets', count_field, mirror)
if state[1] ~= id then return {'other'} end
local last = tonumber(string.match(state[5] or '0', '^%d+'))
if mirror ~= '' and batch ~= last and not (mirror_value ~= '' and batch == last + 1) then
  return {'back'}
end
if state[2] ~= version then return {'version'} end
if mirror ~= '' and not state[5] then  -- a new mirror: remove the fields of crawls that were killed
  local now, fields = string.match(mirror_value, '%d+$'), call('HGETALL', filter)
  for index = 1, #fields, 2 do
    local last_used = string.match(fields[index + 1], '^%d+ (%d+)$')
    if string.sub(fields[index], 1, 7) == 'mirror:' and last_used and now - last_used > 604800 then
      call('HDEL', filter, fields[index])
    end
  end
end
local forgets, count, answers = state[3], state[4], {}
"""

_ANSWER = r"""
while at < #ARGV do
  local answer = look_up()
  if not answer then return {'lost'} end
  answers[#answers + 1] = answer
  if (answer == 'n' or answer == 'f') and records then record(answer) end
end
if recorded > 0 then count = call('HINCRBY', filter, count_field, recorded) end
if mirror_value ~= '' then call('HSET', filter, mirror, mirror_value) end
return {'ok', table.concat(answers), forgets, count}
"""

# Arguments, in this order; "n times" is preceded by a number n:
# - id, version, worker, number of the batch, lease in ms
# - field of the newest generation's count, the generations
# - requests found, n times: 1 to queue it only if its fingerprint is new, 1 to record the
#   fingerprint, 1 if the newest comes first, order, data, the fingerprint with its bits, or ''
#   twice without a fingerprint
# - fingerprints to be recorded without a request, n times
# - fingerprints to be forgotten, n times
# - tokens of requests that are done, n times
# - tokens of requests that are set aside, n times
# - requests that are downloaded, n times: token, slot, for how many ms no other worker may take a
#   request of the slot
# - how many requests to take, 1 to take them by slots
# - downloads of this worker, n times: slot, number
# - the limit of a slot (0: any number of downloads), 1 if it has a delay
# - limits of single slots, n times: slot, limit, 1 if it has a delay
# - 1 to take a suspect although the worker has other requests
# - 1 to run start(), 1 if start() has ended, 1 if the crawl has ended
#
# An order is the beginning of a member, up to its position. A repeated batch, whose reply was lost,
# gets a reply without answers.
_BATCH = r"""
local id, version, me, batch, lease, count_field =
  arg(), arg(), arg(), number(), number(), arg()
local forgotten = KEYS[9]
local state = call('HMGET', filter, 'id', 'version', 'pushed', 'done', 'forgets', count_field)
if state[1] ~= id then return {'other'} end
local last = tonumber(call('HGET', workers, me .. ':number'))
if not last or batch < last or batch > last + 1 then return {'back'} end
local entries = call('ZCARD', pending) + call('ZCARD', leased) + call('ZCARD', suspects)
    + call('ZCARD', dead) + call('ZCARD', aside)
if entries < (tonumber(state[3]) or 0) - (tonumber(state[4]) or 0) then return {'lost'} end
local is_retry = batch == last
if state[2] ~= version and not is_retry then return {'version'} end

local pushed, forgets, count = tonumber(state[3]) or 0, state[5], state[6]
local answers, died, expired = {}, {}, {}
local function taken_by_this()
  local numbered = me .. struct.pack('>I6', batch)
  return call('ZRANGEBYLEX', leased, '[' .. numbered, '(' .. numbered .. '\255')
end

local function reply(entries)
  call('HSET', workers, me, now + lease, me .. ':number', batch)
  local state = call('HMGET', filter, 'pushed', 'done', 'start', 'ended')
  local number = call('ZCARD', pending)
  return {'ok', table.concat(answers), {forgets, count},
          entries, state[3] or '', number + call('ZCARD', suspects) + call('ZCARD', leased),
          number, state[1] or '0', state[2] or '0', state[4] or '', died, expired,
          call('HEXISTS', workers, me .. ':stop')}
end

if is_retry then return reply(taken_by_this()) end
"""

_FOUND = r"""
local function enqueue(order, newest_first, data)
  local position = pushed + 1
  if newest_first then position = 2^53 - position end
  call('ZADD', pending, 0, order .. struct.pack('>I8', position) .. '\0' .. data)
  pushed = call('HINCRBY', filter, 'pushed', 1)
end

for index = 1, number() do
  local is_filtered, is_recorded, newest_first = arg() == '1', arg() == '1', arg() == '1'
  local order, data = arg(), arg()
  local answer = look_up()
  if not answer then return {'lost'} end
  local is_new = answer == 'n' or answer == 'f'
  if is_new or not is_filtered then enqueue(order, newest_first, data) end
  if is_new and is_recorded then record(answer) end
  answers[index] = answer
end
for _ = 1, number() do
  local answer = look_up()
  if not answer then return {'lost'} end
  if answer == 'n' or answer == 'f' then record(answer) end
end
if recorded > 0 then count = call('HINCRBY', filter, count_field, recorded) end

local number_forgotten = number()
for _ = 1, number_forgotten do call('ZADD', forgotten, now / 1000, arg()) end
if number_forgotten > 0 then forgets = call('HINCRBY', filter, 'forgets', 1) end
"""

_LEASES = r"""
local finished = 0
for _ = 1, number() do
  local token = arg()
  local entry = me .. token
  if call('ZLEXCOUNT', leased, '[' .. entry, '(' .. entry .. '\255') > 0 then
    call('HINCRBY', filter, 'done', 1)
    call('ZREMRANGEBYLEX', leased, '[' .. entry, '(' .. entry .. '\255')
    finished = finished + 1
    if call('HGET', workers, me .. ':suspect') == token then
      call('HDEL', workers, me .. ':suspect')
    end
  end
end
if finished > 0 then call('HINCRBY', workers, me .. ':done', finished) end
for _ = 1, number() do
  local entry = first_of(leased, me .. arg())
  if entry then move(leased, entry, aside, string.sub(entry, 25)) end
end

for _ = 1, number() do
  local token, slot, pause = arg(), arg(), number()
  local prefix = slot .. '\0' .. me
  if pause > 0 then
    local marks = prefix .. '\255'
    call('ZREMRANGEBYLEX', downloading, '[' .. marks, '[' .. marks .. '\255')
    call('ZADD', downloading, 0, marks .. struct.pack('>I7', now + pause))
  end
  call('ZREM', downloading, prefix .. token)
end

-- Returns requests of workers that are not in the hash: they have left or rejoined, or were lost.
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
      call('HDEL', workers, name)  -- no request is left that counts this worker
    end
  end
  return_orphans(known)
  call('HSET', filter, 'crew', #known)
  return may_move() and now + math.min(1000, lease / 4) or now
end

local lasts_until = tonumber(call('HGET', workers, me))
local look = tonumber(call('HGET', filter, 'look'))
if not lasts_until or lasts_until < now then
  -- All workers may have been unable to renew their leases, for example during an outage of the
  -- server. So the others get the time of a lease to renew theirs.
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
local usual, special = {number(), arg() == '1'}, {}
for _ = 1, number() do
  local slot = arg()
  special[slot] = {number(), arg() == '1'}
end
local stands_still, may_start, start_ended, is_over =
  arg() == '1', arg() == '1', arg() == '1', arg() == '1'

local entries = taken_by_this()  -- not empty if this batch has failed half-way before
local taken = #entries
local function take(from, member)
  local token = struct.pack('>I6', batch) .. struct.pack('>H', taken)
  local entry = me .. token .. member
  taken = taken + 1
  entries[#entries + 1] = entry
  if from == suspects then
    call('ZADD', leased, 0, entry)
    call('HSET', workers, me .. ':suspect', token)
  elseif by_slot then
    local slot = string.sub(member, 1, string.find(member, '\0', 1, true) - 1)
    local limit = special[slot] or usual
    if limit[1] > 0 or limit[2] then
      call('ZADD', downloading, 0, slot .. '\0' .. me .. token)
    end
  end
  move(from, member, leased, entry)
end

-- How many requests this worker may take, by slot; filled by `room_of`.
local rooms, crew = {}, tonumber(call('HGET', filter, 'crew')) or 1

-- Requests of a slot with a delay are taken by one worker at a time, which keeps to the delay. Of
-- the limit of another slot, each worker may use its share.
local function room_of(slot)
  if rooms[slot] then return rooms[slot] end
  local most, has_delay = unpack(special[slot] or usual)
  local room, ours, others = want, 0, 0
  if most > 0 or has_delay then
    if most == 0 then most = want end
    local from, to = '[' .. slot .. '\0', '(' .. slot .. '\1'
    for _, entry in ipairs(call('ZRANGEBYLEX', downloading, from, to)) do
      local worker, token = string.sub(entry, #slot + 2, #slot + 17), string.sub(entry, #slot + 18)
      local ends = string.byte(token) == 255 and struct.unpack('>I7', token, 2)
      if ends and (ends <= now or ends > now + 86400000)
          or not ends and call('HEXISTS', workers, worker) == 0 then
        call('ZREM', downloading, entry)
      elseif worker ~= me then
        others = others + 1
      elseif not ends then
        ours = ours + 1
      end
    end
    if not has_delay then
      room = math.min(most - others, math.ceil(most / crew)) - ours
    else
      room = others == 0 and most - ours or 0
    end
  end
  rooms[slot] = room
  return room
end

-- To find the next slot, its first request is read, so the number of slots is bounded.
local slots_to_read, bytes_to_read = 64, 262144
local function slot_after(slot)
  local member = call('ZRANGEBYLEX', pending, '(' .. slot .. '\1', '+', 'LIMIT', 0, 1)[1]
      or call('ZRANGE', pending, 0, 0)[1]
  if not member then return nil end
  slots_to_read, bytes_to_read = slots_to_read - 1, bytes_to_read - #member
  return string.sub(member, 1, string.find(member, '\0', 1, true) - 1), member
end

-- Returns, beginning after the slot from which a request was taken last: the slots from which this
-- worker may take requests, no more than it wants; the first request of each; the places of these
-- slots by their number of downloads; the highest such number; the slot that was looked at last.
local function slots_in_turn()
  local slots, firsts, levels, highest, idle = {}, {}, {}, 0, want - taken
  local slot, member = slot_after(call('HGET', filter, 'last') or '')
  local first, looked_at = slot, slot
  while slot do
    if room_of(slot) > 0 then
      slots[#slots + 1], firsts[#slots + 1] = slot, member
      local level = busy[slot] or 0
      levels[level] = levels[level] or {}
      table.insert(levels[level], #slots)
      highest = math.max(highest, level)
      if level == 0 then idle = idle - 1 end
    end
    looked_at = slot
    if idle <= 0 or slots_to_read <= 0 or bytes_to_read <= 0 then break end
    slot, member = slot_after(slot)
    if slot == first then break end
  end
  return slots, firsts, levels, highest, looked_at
end

-- Takes requests from the slots with the fewest downloads first, round-robin.
local function take_by_slot()
  local slots, firsts, levels, highest, looked_at = slots_in_turn()
  local level, last = 0, 0
  while level <= highest do
    local places = levels[level] or {}
    table.sort(places, function(a, b)
      if (a > last) ~= (b > last) then return a > last end
      return a < b
    end)
    for _, place in ipairs(places) do
      if taken >= want or not may_move() then break end
      local slot = slots[place]
      -- Not by `first_of`, whose range ends before a priority that begins with a byte of 255.
      local from, to = '[' .. slot .. '\0', '(' .. slot .. '\1'
      local member = firsts[place] or call('ZRANGEBYLEX', pending, from, to, 'LIMIT', 0, 1)[1]
      if member then
        take(pending, member)
        firsts[place] = nil
        last = place
        rooms[slot] = rooms[slot] - 1
        if rooms[slot] > 0 then
          highest = math.max(highest, level + 1)
          levels[level + 1] = levels[level + 1] or {}
          table.insert(levels[level + 1], place)
        end
      end
    end
    if taken >= want or not may_move() then break end
    level = level + 1
  end
  if looked_at then call('HSET', filter, 'last', slots[last] or looked_at) end
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
  if call('ZCARD', pending) == 0 and taken == 0
      and (stands_still or not first_of(leased, me)) then
    local member = call('ZRANGE', suspects, 0, 0)[1]
    if member then
      -- Workers that seemed to have died may have rejoined, so that their deaths do not count.
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

RECORD = BASE + _RECORD + _BITS + _ANSWER  # without a queue
BATCH = COMMON + _BATCH + _BITS + _FOUND + _LEASES + _TAKE
