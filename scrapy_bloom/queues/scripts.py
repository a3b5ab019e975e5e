"""The steps of a shared queue, each one atomic Lua script, and what its keys hold.

    {<key>}:queue:pending   a sorted set whose scores are all 0, in the order of its members: slot,
                            NUL, priority (8 bytes), rank (1), position (8), the request
    {<key>}:queue:leased    likewise: worker (16), position (8), the member as it was pending; the
                            worker `unreadable000000` has what no worker can make a request of again
    {<key>}:queue:workers   a hash
      <worker>                until when its lease lasts, in ms since 1970
      <worker>:name           host:pid, for people
      <worker>:push           number and position of its last push; stays if its lease ends
      <worker>:newest         the member that it pushed last, and may not have recorded yet
      <worker>:take           token of its last take, and the positions of what it got
    {<key>}:queue:state     a hash
      id                      of this queue
      pushed, done            how many requests, ever
      last                    the slot that was served last
      starting, started       the worker that runs start(); 1 when it is through
      ended                   when nothing was left, in ms
      look                    when to look for dead workers next, in ms
      flushed                 with `id` and `ended` only, for a day: the last worker removes all
    <key>                   the filter's hash: its field `queue` is the id

Numbers are big-endian. A priority is 2^63 - 1 less its value, a rank 128 more. A position is n, or
2^53 - n where the newest comes first; n counts the pushes, so it names a request as well. All keys
are in one slot of a Cluster. The clock is the server's.
"""

_COMMON = r"""
local pending, leased, workers, state, filter = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local call = redis.call
local time = call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local me = ARGV[1]

local function first_leased(prefix)
  return call('ZRANGEBYLEX', leased, '[' .. prefix, '(' .. prefix .. '\255', 'LIMIT', 0, 1)[1]
end

local function held_by(worker)
  return call('ZLEXCOUNT', leased, '[' .. worker, '(' .. worker .. '\255')
end

local function give_back(worker)
  local number = held_by(worker)
  for _ = 1, number do
    local member = first_leased(worker)
    call('ZREM', leased, member)
    call('ZADD', pending, 0, string.sub(member, 25))
  end
  call('HDEL', workers, worker, worker .. ':name', worker .. ':take', worker .. ':newest')
  if call('HGET', state, 'starting') == worker then call('HDEL', state, 'starting') end
  return number
end

local aside = 'unreadable000000'

local function others()
  local number, all = 0, call('HGETALL', workers)
  for index = 1, #all, 2 do
    if #all[index] == 16 and all[index] ~= me and tonumber(all[index + 1]) >= now then
      number = number + 1
    end
  end
  return number
end

local function note_end()
  local left = call('ZCARD', pending) + call('ZCARD', leased)
  if call('HGET', state, 'started') and left == held_by(aside) then
    call('HSETNX', state, 'ended', now)
  end
end

local function done(from, number)
  for index = from, from + number - 1 do
    local prefix = me .. ARGV[index]
    local gone = call('ZREMRANGEBYLEX', leased, '[' .. prefix, '(' .. prefix .. '\255')
    if gone > 0 then call('HINCRBY', state, 'done', 1) end
  end
end
"""

# worker, its name, lease in ms, an id for a new queue, the worker's former self or ''
JOIN = (
    _COMMON
    + r"""
local mark = call('HGET', filter, 'queue')
if call('HEXISTS', state, 'flushed') == 1 then
  if ARGV[5] ~= '' then return {2} end
  -- With the mark, the filter is still there: who should have removed it was killed.
  if not mark then call('DEL', state) end
end
local id = call('HGET', state, 'id')
if not id and mark then return {0} end
if not id then
  id = ARGV[4]
  call('HSET', state, 'id', id)
end
local former, last, returned = ARGV[5], false, 0
if former == '' and others() == 0 and give_back(aside) > 0 then call('HDEL', state, 'ended') end
if not mark and call('HEXISTS', filter, 'filter') == 1 then call('HSET', filter, 'queue', id) end
if former ~= '' then
  last = call('HGET', workers, former .. ':push')
  returned = give_back(former)
end
call('HSET', workers, me, now + ARGV[3], me .. ':name', ARGV[2])
return {1, id, last, returned, others(), call('ZCARD', pending), call('HGET', state, 'ended')}
"""
)

# worker, lease in ms
RENEW = (
    _COMMON
    + r"""
if call('HEXISTS', workers, me) == 0 then return 0 end
call('HSET', workers, me, now + ARGV[2])
if call('HGET', filter, 'queue') == false and call('HEXISTS', filter, 'filter') == 1 then
  call('HSET', filter, 'queue', call('HGET', state, 'id'))
end
return 1
"""
)

# worker, number of the push, slot to rank, 1 if newest first, the request
PUSH = (
    _COMMON
    + r"""
local last = call('HGET', workers, me .. ':push') or '0 '
local number = string.match(last, '^%d+')
if number == ARGV[2] then return string.sub(last, #number + 2) end
if number + 1 ~= tonumber(ARGV[2]) or call('HEXISTS', workers, me) == 0 then return '' end
local position = call('HINCRBY', state, 'pushed', 1)
if ARGV[4] == '1' then position = 2^53 - position end
position = struct.pack('>I8', position)
local member = ARGV[3] .. position .. ARGV[5]
call('ZADD', pending, 0, member)
call('HSET', workers, me .. ':push', ARGV[2] .. ' ' .. position, me .. ':newest', member)
call('HDEL', state, 'ended')
return position
"""
)

# worker, number of its last push, token, how many, lease in ms, 1 if by slots; how many are done,
# their positions; slots and how many downloads each has
TAKE = (
    _COMMON
    + r"""
local lasts_until = call('HGET', workers, me)
local last_push = string.match(call('HGET', workers, me .. ':push') or '0', '^%d+')
if not lasts_until or tonumber(last_push) < tonumber(ARGV[2]) then return {0} end
local by_slot, first_busy = ARGV[6] == '1', 8 + ARGV[7]
done(8, tonumber(ARGV[7]))

local dead = {}
local look = tonumber(call('HGET', state, 'look') or 0)
if tonumber(lasts_until) < now then
  -- All may have stood still, as when the server was away: let the others renew theirs first.
  call('HSET', workers, me, now + ARGV[5])
  call('HSET', state, 'look', now + ARGV[5] / 2)
elseif look <= now or look > now + ARGV[5] then
  call('HSET', state, 'look', now + math.min(1000, ARGV[5] / 4))
  local all = call('HGETALL', workers)
  for index = 1, #all, 2 do
    if #all[index] == 16 and tonumber(all[index + 1]) < now then
      local name = call('HGET', workers, all[index] .. ':name')
      local newest = call('HGET', workers, all[index] .. ':newest')
      local returned = give_back(all[index])
      -- What is not pending any more has been met since, and perhaps forgotten again.
      newest = newest and call('ZSCORE', pending, newest) and newest
      dead[#dead + 1] = {name, newest, returned}
    end
  end
end

local function after(slot)
  return call('ZRANGEBYLEX', pending, '(' .. slot .. '\1', '+', 'LIMIT', 0, 1)[1]
      or call('ZRANGE', pending, 0, 0)[1]
end

local busy = {}
for index = first_busy, #ARGV, 2 do busy[ARGV[index]] = tonumber(ARGV[index + 1]) end

local function slot_of(member)
  return string.sub(member, 1, string.find(member, '\0', 1, true) - 1)
end

local function next_of_slots()
  local best = after(call('HGET', state, 'last') or '')
  if not best then return nil end
  local first = slot_of(best)
  local slot, chosen, fewest = first, first, busy[first] or 0
  while fewest > 0 do
    local member = after(slot)
    slot = slot_of(member)
    if slot == first then break end
    if (busy[slot] or 0) < fewest then best, chosen, fewest = member, slot, busy[slot] or 0 end
  end
  busy[chosen] = fewest + 1
  call('HSET', state, 'last', chosen)
  return best
end

local members = {}
local memory = call('HGET', workers, me .. ':take') or ''
local size = #ARGV[3]
if string.sub(memory, 1, size) == ARGV[3] then
  for at = size + 1, #memory, 8 do
    local prefix = me .. string.sub(memory, at, at + 7)
    members[#members + 1] = first_leased(prefix)
  end
else
  memory = ARGV[3]
  for _ = 1, tonumber(ARGV[4]) do
    local member
    if by_slot then member = next_of_slots() else member = call('ZRANGE', pending, 0, 0)[1] end
    if not member then break end
    local at = string.find(member, '\0', 1, true) + 10
    local position = string.sub(member, at, at + 7)
    call('ZREM', pending, member)
    member = me .. position .. member
    call('ZADD', leased, 0, member)
    members[#members + 1] = member
    memory = memory .. position
  end
  call('HSET', workers, me .. ':take', memory)
end

note_end()
return {1, call('ZCARD', pending), held_by(me),
        call('HGET', state, 'started') or call('HGET', state, 'starting'),
        call('HGET', state, 'ended'), dead, members}
"""
)

# worker, the member that it pushed last
TAKE_BACK = (
    _COMMON
    + r"""
-- If its lease has ended, another worker may have recorded that: it must stay.
if call('HEXISTS', workers, me) == 0 then return 0 end
return call('ZREM', pending, ARGV[2])
"""
)

# worker
START = (
    _COMMON
    + r"""
if call('HEXISTS', workers, me) == 0 then return 0 end
if call('HGET', state, 'started') then return 0 end
call('HSETNX', state, 'starting', me)
return call('HGET', state, 'starting') == me and 1 or 0
"""
)

# worker, id of the queue, 1 if start() is through, '' if it has failed
STARTED = (
    _COMMON
    + r"""
local starting = call('HGET', state, 'starting')
if call('HGET', state, 'id') ~= ARGV[2] or (starting and starting ~= me) then return 0 end
call('HDEL', state, 'starting')
if ARGV[3] == '1' then call('HSET', state, 'started', 1) end
return 1
"""
)

# worker, 1 to remove a queue that is over, if nobody else is there; number done, their positions
LEAVE = (
    _COMMON
    + r"""
done(4, tonumber(ARGV[3]))
give_back(me)
call('HDEL', workers, me .. ':push')
note_end()
local others, set_aside, ended = others(), held_by(aside), call('HGET', state, 'ended')
local is_flushed = ARGV[2] == '1' and ended and others + set_aside == 0
if is_flushed then
  local id = call('HGET', state, 'id')
  call('UNLINK', pending, leased, workers, state)
  call('HSET', state, 'flushed', 1, 'ended', ended, 'id', id)
  call('PEXPIRE', state, 86400000) -- the longest lease
end
return {others, set_aside, call('ZCARD', pending), ended, is_flushed and 1 or 0}
"""
)

# worker, position
SET_ASIDE = (
    _COMMON
    + r"""
local prefix = me .. ARGV[2]
local member = first_leased(prefix)
if member then
  call('ZREM', leased, member)
  call('ZADD', leased, 0, aside .. string.sub(member, 17))
end
"""
)
