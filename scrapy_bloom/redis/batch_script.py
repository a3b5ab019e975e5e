"""Lua scripts that apply a batch to a filter and its queue, or to a filter alone.

`scrapy_bloom.redis.scripts` documents the stored fields and the layout of a member.
"""

from scrapy_bloom.redis.layout import BATCH as BATCH_FIELDS
from scrapy_bloom.redis.layout import BATCH_REPLY, lua_arguments, lua_reply
from scrapy_bloom.redis.layout import RECORD as RECORD_FIELDS
from scrapy_bloom.redis.scripts import BASE, COMMON

_BITS = r"""
local whole, words, recorded = {}, {}, 0

local function has_all(block, positions, number)
  for index = 1, number do
    if call('GETBIT', block.key, block.first + positions[index]) == 0 then return false end
  end
  return true
end

-- Returns the place of a generation that has a fingerprint, 0 if none has, nil if a key was lost.
local function look_up(bits)
  local found = 0
  for place, number in ipairs(generations) do
    local block = bits[place]
    if whole[block.key] == nil then
      whole[block.key] = call('STRLEN', block.key) == block.length
    end
    if not whole[block.key] then return nil end
    if has_all(block, bits.positions, number) then found = place end
  end
  return found
end

-- Records a fingerprint in the newest generation, and returns the place of that. One command sets
-- the bits, because each command takes time.
local function record(bits)
  local block = bits[#generations]
  local last = 4 * generations[#generations]
  for index = 4, last, 4 do
    words[index - 3], words[index - 2], words[index] = 'SET', 'u1', '1'
    words[index - 1] = block.first + bits.positions[index / 4]
  end
  call('BITFIELD', block.key, unpack(words, 1, last))
  recorded = recorded + 1
  return #generations
end

local function letter(place)
  return place == 0 and 'n' or string.char(place)
end
"""

# The answer to a fingerprint is "n" (new), or the place of a generation that has the fingerprint,
# as a character.
_RECORD = r"""
local mirror = given.mirror
local state = call('HMGET', filter, 'id', 'version', given.count_field, mirror)
if state[1] ~= given.id then return {'other'} end
local last = tonumber(string.match(state[4] or '0', '^%d+'))
local is_numbered = given.mirror_value ~= ''
if mirror ~= '' and given.number ~= last and not (is_numbered and given.number == last + 1) then
  return {'back'}
end
if state[2] ~= given.version then return {'version'} end
if mirror ~= '' and not state[4] then  -- a new mirror: remove the fields of crawls that were killed
  local now, fields = string.match(given.mirror_value, '%d+$'), call('HGETALL', filter)
  for index = 1, #fields, 2 do
    local last_used = string.match(fields[index + 1], '^%d+ (%d+)$')
    if string.sub(fields[index], 1, 7) == 'mirror:' and last_used and now - last_used > 604800 then
      call('HDEL', filter, fields[index])
    end
  end
end
local count, answers = state[3], {}
for index, each in ipairs(given.fingerprints) do
  local place = look_up(each.bits)
  if not place then return {'lost'} end
  answers[index] = letter(place)
  if place == 0 and given.records then record(each.bits) end
end
if recorded > 0 then count = call('HINCRBY', filter, given.count_field, recorded) end
if is_numbered then call('HSET', filter, mirror, given.mirror_value) end
return {'ok', table.concat(answers), count}
"""

# A repeated batch, whose reply was lost, gets a reply without places and without dead requests.
_BATCH = r"""
local me, batch, lease, want = given.worker, given.number, given.lease, given.want
local state = read_state('id', 'version', 'run', 'run_name', 'began', 'kept', 'epoch', 'pushed',
                         'requeued', 'done', given.count_field)
if state.id ~= given.id then return {'other'} end
local last = tonumber(call('HGET', workers, me .. ':number'))
if not last or batch < last or batch > last + 1 then return {'back'} end
local entries = call('ZCARD', pending) + call('ZCARD', leased) + call('ZCARD', suspects)
    + call('ZCARD', dead) + call('ZCARD', unreadable) + call('ZCARD', failed)
    + call('ZCARD', given_up)
if entries < (tonumber(state.pushed) or 0) - (tonumber(state.done) or 0) then return {'lost'} end
local is_retry = batch == last
if state.version ~= given.version and not is_retry then return {'version'} end
if state.run ~= given.run and not is_retry then
  return {'run', state.run or '', state.run_name or '', state.began or '0', state.kept or '0'}
end

local count, places, queued, died, expired, number_given_up = state[given.count_field] or 0,
  {}, {}, {}, {}, 0
local function taken_by_this()
  local numbered = me .. struct.pack('>I6', batch)
  return call('ZRANGEBYLEX', leased, '[' .. numbered, '(' .. numbered .. '\255')
end

local function count_left()
  return call('ZCARD', pending) + call('ZCARD', suspects) + call('ZCARD', leased)
      + count_earlier(state.epoch)
end

local function reply(taken)
  call('HSET', workers, me, now + lease, me .. ':number', batch)
  local fates = {}
  for index, fingerprint in ipairs(given.asked) do
    fates[index] = call('HGET', targets, fingerprint) or '-'
  end
  local state = read_state('pushed', 'done', 'start', 'ended')
  return replied({
    queued = table.concat(queued), places = table.concat(places), fates = table.concat(fates),
    count = count, taken = taken, start = state.start or '', left = count_left(),
    pending = call('ZCARD', pending), pushed = state.pushed or 0, done = state.done or 0,
    ended = state.ended or '', died = died, given_up = number_given_up, expired = expired,
    is_stopped = call('HEXISTS', workers, me .. ':stop') == 1,
  })
end

if is_retry then return reply(taken_by_this()) end
"""

_ENTERED = r"""
-- Returns the members of failed and given_up that have a fingerprint, each with its key.
local oldest  -- epoch of a member of failed
local function failures_of(fingerprint)
  if not oldest then
    local first = call('ZRANGE', failed, 0, 0)[1]
    oldest = first and epoch_of(first) or state.epoch
  end
  local start = failure_start(fingerprint)
  local found, member = {}, first_of(given_up, start)
  if member then
    found[1] = {key = given_up, member = member, row = parsed_failure(given_up, member)}
  end
  for epoch = oldest, state.epoch do
    for _, tries in ipairs({0, MOST_TRIES}) do
      member = first_of(failed, failed_start(epoch, tries) .. start)
      if member then
        local row = parsed_failure(failed, member)
        found[#found + 1] = {key = failed, member = member, row = row}
      end
    end
  end
  return found
end

local function remove_failure(failure)
  call('HINCRBY', filter, 'done', 1)
  call('ZREM', failure.key, failure.member)
end

local has_targets = call('EXISTS', targets) == 1

-- Keeps a link to a page that is a target as failed until the page is done. Returns false if there
-- is one.
local function keep_link(entered)
  if #failures_of(entered.fingerprint) > 0 then return false end
  call('ZADD', failed, 0, failed_start(state.epoch, 0)
       .. failure(entered.fingerprint, 0, LINKED, entered.newest_first,
                  entered.order .. entered.data))
  state.pushed = call('HINCRBY', filter, 'pushed', 1)
  return true
end

local function enqueue(entered, tries)
  call('ZADD', pending, 0, positioned(entered.order, state, entered.newest_first)
                           .. string.char(tries) .. '\0' .. entered.data)
  state.pushed = call('HINCRBY', filter, 'pushed', 1)
  for _, fingerprint in ipairs(entered.via) do
    call('HSET', targets, fingerprint, 'u')
    has_targets = true
  end
end

for index, entered in ipairs(given.entered) do
  local own, once, place, is_new = entered.bits, entered.once, 0, true
  if own then
    place = look_up(once or own)
    if not place then return {'lost'} end
    is_new = place == 0
        and not (has_targets and call('HEXISTS', targets, entered.fingerprint) == 1)
  end
  local is_queued, failures, tries = is_new or not entered.is_filtered, {}, 0
  if not is_queued and place == 0 and #entered.via == 0 then
    local own_place = 0
    if once then own_place = look_up(own) end
    if not own_place then return {'lost'} end
    if own_place == 0 and keep_link(entered) and entered.is_recorded then
      own_place = record(own)
      if not once then place = own_place end
    end
  end
  if is_queued then
    if once and is_new then failures = failures_of(entered.fingerprint) end
    for _, each in ipairs(failures) do
      tries = math.max(tries, math.min(each.row.tries + 1, MOST_TRIES))
    end
    enqueue(entered, tries)
    for _, each in ipairs(failures) do remove_failure(each) end
  end
  local own_place = once and 0 or place
  if own and is_new and entered.is_recorded then
    if once then
      own_place = look_up(own)
      if not own_place then return {'lost'} end
    end
    if own_place < given.lasting then own_place = record(own) end
    if once then place = record(once) end
  end
  queued[index] = is_queued and '1' or '0'
  if own then places[#places + 1] = letter(own_place) end
  if once then places[#places + 1] = letter(place) end
end
for _, each in ipairs(given.recorded) do
  local place = look_up(each.bits)
  if not place then return {'lost'} end
  places[#places + 1] = letter(place < given.lasting and record(each.bits) or place)
end
if recorded > 0 then count = call('HINCRBY', filter, given.count_field, recorded) end
"""

_ENDED = r"""
-- Keeps a request as failed, and no other one of its fingerprint.
local function keep_failed(ended)
  local earlier, tries, is_given_up = failures_of(ended.fingerprint), ended.tries, false
  for _, each in ipairs(earlier) do
    tries = math.max(tries, each.row.tries)
    is_given_up = is_given_up or each.key == given_up
  end
  is_given_up = is_given_up or tries >= MOST_TRIES
  local key = is_given_up and given_up or failed
  local member = failure(ended.fingerprint, tries, ended.reason, ended.newest_first,
                         ended.order .. ended.data)
  if not is_given_up then member = failed_start(state.epoch, tries) .. member end
  call('ZADD', key, 0, member)
  for _, each in ipairs(earlier) do
    if each.member == member then
      call('HINCRBY', filter, 'done', 1)
    else
      remove_failure(each)
    end
  end
end

local finished = 0
for _, ended in ipairs(given.ended) do
  local start, token = me .. ended.token, ended.token
  local entry = first_of(leased, start)
  if entry then
    for _, fingerprint in ipairs(ended.via) do
      if ended.how == 'failed' then
        call('HSET', targets, fingerprint, 'f')
      elseif ended.how == 'done' then
        call('HDEL', targets, fingerprint)
        for _, each in ipairs(failures_of(fingerprint)) do
          if each.key == failed and epoch_of(each.member) == state.epoch then
            remove_failure(each)
          end
        end
      end
    end
    if ended.how == 'unreadable' then
      call('ZADD', unreadable, 0, string.sub(entry, 25))
    elseif ended.how == 'failed' then
      keep_failed(ended)
    else
      call('HINCRBY', filter, 'done', 1)
    end
    if ended.how ~= 'unreadable' then finished = finished + 1 end
    call('ZREM', leased, entry)
    if call('HGET', workers, me .. ':suspect') == token then
      call('HDEL', workers, me .. ':suspect')
    end
  end
end
if finished > 0 then call('HINCRBY', workers, me .. ':done', finished) end

-- Returns the worker of an entry of `downloading`, whether it is a pause, and whether it is over. A
-- pause that would last longer than it was long is over, because the clock was set back.
local function parsed_download(entry)
  local at = string.find(entry, '\0', 1, true)
  local worker = string.sub(entry, at + 1, at + 16)
  if string.byte(entry, at + 17) ~= 255 then
    return worker, false, call('HEXISTS', workers, worker) == 0
  end
  local ends, pause = struct.unpack('>I7I4', entry, at + 18)
  return worker, true, ends <= now or ends > now + pause
end

-- Removes what is over among so many entries, which begin anywhere. Otherwise, the pauses of slots
-- without requests would stay.
local function sweep(number)
  if number == 0 then return end
  local first = now % math.max(1, call('ZCARD', downloading) - number + 1)
  for _, entry in ipairs(call('ZRANGE', downloading, first, first + number - 1)) do
    local _, _, is_over = parsed_download(entry)
    if is_over then call('ZREM', downloading, entry) end
  end
end

for _, downloaded in ipairs(given.downloaded) do
  local prefix = downloaded.slot .. '\0' .. me
  if downloaded.pause > 0 then
    local marks = prefix .. '\255'
    call('ZREMRANGEBYLEX', downloading, '[' .. marks, '[' .. marks .. '\255')
    call('ZADD', downloading, 0,
         marks .. struct.pack('>I7I4', now + downloaded.pause, downloaded.pause))
  end
  call('ZREM', downloading, prefix .. downloaded.token)
end
sweep(2 * #given.downloaded)  -- more than enter

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
    elseif string.sub(name, 17) == ':back' then
      -- Without it, the requests in which it seemed to die would count its death.
      if is_empty then call('HDEL', workers, name) end
    elseif string.sub(name, 17) == ':number' then
      local since = tonumber(string.match(all[index + 1], '^gone %d+ (%d+)$'))
      if since and math.abs(now - since) > 3600000 then  -- it will not come back
        local worker = string.sub(name, 1, 16)
        call('HDEL', workers, name, worker .. ':dead', worker .. ':stop')
      end
    end
  end
  return_orphans(known)
  sweep(100)
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
local by_slot, busy, special = given.by_slot, {}, {}
for _, each in ipairs(given.downloads) do busy[each.slot] = each.number end
for _, each in ipairs(given.limits) do special[each.slot] = each end

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
    local limit = special[slot] or given
    if limit.limit > 0 or limit.has_delay then
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
  local limit = special[slot] or given
  local most, has_delay = limit.limit, limit.has_delay
  local room, ours, others = want, 0, 0
  if most > 0 or has_delay then
    if most == 0 then most = want end
    local from, to = '[' .. slot .. '\0', '(' .. slot .. '\1'
    for _, entry in ipairs(call('ZRANGEBYLEX', downloading, from, to)) do
      local worker, is_pause, is_over = parsed_download(entry)
      if is_over then
        call('ZREM', downloading, entry)
      elseif worker ~= me then
        others = others + 1
      elseif not is_pause then
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

-- Makes failed requests of an earlier epoch pending, or gives them up; spares so many moves.
local function retry_earlier(spared)
  local earlier = '(' .. struct.pack('>I4', state.epoch)
  while may_move() and moves > spared do
    local member = call('ZRANGEBYLEX', failed, '-', earlier, 'LIMIT', 0, 1)[1]
    if not member then break end
    local row = parsed_failure(failed, member)
    if row.tries + 1 < MOST_TRIES then
      retry(failed, member, row.tries + 1, state)
    else
      move(failed, member, given_up, failure(row.fingerprint, row.tries + 1, row.reason,
                                             row.newest_first, row.rest))
      number_given_up = number_given_up + 1
    end
  end
end

if call('ZCARD', pending) == 0 then retry_earlier(want) end
if want > taken and (given.stands_still or not call('HGET', workers, me .. ':suspect')) then
  if by_slot then
    take_by_slot()
  else
    while taken < want and may_move() do
      local member = call('ZRANGE', pending, 0, 0)[1]
      if not member then break end
      take(pending, member)
    end
  end
  if call('ZCARD', pending) == 0 and taken == 0 and count_earlier(state.epoch) == 0
      and (given.stands_still or not first_of(leased, me)) then
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
retry_earlier(0)

local start = call('HGET', filter, 'start')
if given.start_ended and start == me then
  start = 'done'
  call('HSET', filter, 'start', start)
elseif given.may_start and not start then
  call('HSET', filter, 'start', me)
end
if count_left() > 0 or start ~= 'done' then
  call('HDEL', filter, 'ended')
elseif given.is_over then
  call('HSETNX', filter, 'ended', now)
end
return reply(entries)
"""

RECORD = (  # without a queue
    BASE + "local filter = KEYS[1]\n" + lua_arguments(RECORD_FIELDS) + _BITS + _RECORD
)
BATCH = (
    COMMON
    + lua_arguments(BATCH_FIELDS)
    + lua_reply(BATCH_REPLY)
    + _BATCH
    + _BITS
    + _ENTERED
    + _ENDED
    + _TAKE
)
