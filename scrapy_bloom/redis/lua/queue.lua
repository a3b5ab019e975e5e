-- What the scripts of a queue share: its keys, and the layout of its rows. See `redis.layout`.
--
-- KEYS: those of `redis.layout.KEYS`, in this order.

-- Functions are in tables: each local variable of which a function knows costs time in each script.
local queue = {
  keys = {}, died = {}, MOST_DEATHS = 3, MOST_TRIES = 5,
  QUEUED = 'p', WAITING = 'w', FAILED = 'f', DEAD = 'd',  -- states of a row
  -- Its flags, and of a request that enters.
  IS_FILTERED = 'f', IS_START = 's', ONCE = 'o', NEWEST_FIRST = 'n', WAS_TAKEN = 't',
  IS_RECORDED = 'r', PASSES = 'p',
}
local keys, died = queue.keys, queue.died
for place, name in ipairs({'filter', 'rows', 'pending', 'leased', 'suspects', 'kept', 'waiting',
                           'dead', 'unreadable', 'open', 'worklist', 'runs', 'workers'}) do
  keys[name] = KEYS[place]
end

local time = call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
queue.now = now

-- Returns fields of the filter's hash by their names.
function queue.read_state(...)
  local values, state = call('HMGET', keys.filter, ...), {}
  for index, name in ipairs({...}) do state[name] = values[index] or nil end
  state.epoch = tonumber(state.epoch) or 0
  return state
end

-- How many rows and bytes the script may still move, so that it takes no longer than 5 ms.
local moves, bytes = 100, 262144
function queue.may_move(spared)
  return moves > (spared or 0) and bytes > 0
end

function queue.first_in(key, from, to)
  return call('ZRANGEBYLEX', key, from, to, 'LIMIT', 0, 1)[1]
end

function queue.first_with(key, prefix)
  return queue.first_in(key, '[' .. prefix, '(' .. prefix .. '\255')
end

-- Rows.

function queue.parsed_row(id, packed)
  local values = cmsgpack.unpack(packed)
  return {
    id = id, packed = packed, state = values[1], tries = values[2], epoch = values[3],
    position = values[4], flags = values[5], order = values[6], page = values[7],
    waits_for = values[8], reason = values[9], hops = values[10], died = values[11],
    records = values[12], first = values[13], data = values[14],
  }
end

-- Returns the row of a member of a set; nil if it is gone. It counts as so many moves, usually 1.
function queue.row_of(key, member, moved)
  local id = string.sub(member, -8)
  local packed = call('HGET', keys.rows, id)
  moves = moves - (moved or 1)
  if not packed then
    call('ZREM', key, member)
    return nil
  end
  local row = queue.parsed_row(id, packed)
  row.key, row.member = key, member
  bytes = bytes - #packed
  return row
end

function queue.has(row, flag)
  return string.find(row.flags, flag, 1, true) ~= nil
end

function queue.set_flag(row, flag, is_set)
  row.flags = string.gsub(row.flags, flag, '') .. (is_set and flag or '')
end

-- Returns its own page, and hops.
function queue.pages_of(row)
  if not row.pages then
    row.pages = row.page == '' and {} or {row.page}
    for _, hop in ipairs(row.hops) do table.insert(row.pages, hop) end
  end
  return row.pages
end

local hashes = {}  -- of slots

-- Returns the member of a set, other than leased, that has a row. Those of pending begin with the
-- hash of the slot, so that shares of slots are ranges.
function queue.member_of(key, row)
  if key == keys.kept then
    local is_start = queue.has(row, queue.IS_START)
    return (is_start and '\1' or '\0') .. struct.pack('>I4', row.epoch) .. row.id
  end
  if key ~= keys.pending and key ~= keys.suspects then return row.id end
  local slot, position = string.sub(row.order, 1, -11), row.position
  if queue.has(row, queue.NEWEST_FIRST) then position = 2^53 - position end
  hashes[slot] = hashes[slot]
      or struct.pack('>I4', tonumber(string.sub(redis.sha1hex(slot), 1, 8), 16))
  return hashes[slot] .. row.order .. struct.pack('>I8', position) .. row.id
end

-- Returns the beginning of the members of a page: a page may be the beginning of another one.
function queue.prefixed(page)
  return struct.pack('>I4c0', #page, page)
end

-- Returns the beginning of the members of waiting that end with a page; those of an earlier epoch
-- are tried again.
function queue.waiting_for(page, epoch)
  return queue.prefixed(page) .. struct.pack('>I4', epoch)
end

function queue.index(row, page)
  call('ZADD', keys.open, 0, queue.prefixed(page) .. row.id)
end

function queue.unindex(row, pages)
  for _, page in ipairs(pages) do call('ZREM', keys.open, queue.prefixed(page) .. row.id) end
end

-- Stores a row that is new or has changed, and moves it to another set.
function queue.put(row, key)
  local member = queue.member_of(key, row)
  call('HSET', keys.rows, row.id, cmsgpack.pack({
    row.state, row.tries, row.epoch, row.position, row.flags, row.order, row.page, row.waits_for,
    row.reason, row.hops, row.died, row.records, row.first, row.data,
  }))
  call('ZADD', key, 0, member)
  if row.state == queue.WAITING then
    call('ZADD', keys.waiting, 0, queue.waiting_for(row.waits_for, row.epoch) .. row.id)
  end
  if row.key then call('ZREM', row.key, row.member) end
  row.key, row.member = key, member
end

-- Removes what only a waiting row has.
function queue.end_wait(row)
  if row.key == keys.kept and row.state == queue.WAITING then
    call('ZREM', keys.waiting, queue.waiting_for(row.waits_for, row.epoch) .. row.id)
  end
end

-- Removes a row. The set that has it comes last, so that no row stays in the hash alone.
function queue.drop(row)
  call('HINCRBY', keys.filter, 'done', 1)
  queue.end_wait(row)
  queue.unindex(row, queue.pages_of(row))
  call('HDEL', keys.rows, row.id)
  call('ZREM', row.key, row.member)
end

-- Makes a row pending as it first entered, or dead.
function queue.try_again(row, tries)
  local first, is_dead = row.first, tries >= queue.MOST_TRIES
  queue.end_wait(row)
  queue.unindex(row, row.hops)
  if first ~= '' then
    local ends = string.find(first, '\0', 1, true) + 9
    row.order, row.first, row.data = string.sub(first, 1, ends), '', string.sub(first, ends + 2)
    queue.set_flag(row, queue.NEWEST_FIRST, string.byte(first, ends + 1) == 1)
  end
  row.tries, row.epoch, row.waits_for, row.reason = tries, 0, '', is_dead and row.reason or ''
  row.hops, row.died, row.records, row.pages = {}, '', {}, nil
  row.position = call('HINCRBY', keys.filter, 'numbered', 1)
  row.state = is_dead and queue.DEAD or queue.QUEUED
  queue.put(row, is_dead and keys.dead or keys.pending)
end

-- Whether a row is a suspect; the deaths of workers that have rejoined do not count.
function queue.is_suspect(row)
  local deaths = 0
  for at = 1, #row.died, 16 do
    local is_back = call('HEXISTS', keys.workers, string.sub(row.died, at, at + 15) .. ':back')
    deaths = deaths + 1 - is_back
  end
  return deaths >= queue.MOST_DEATHS
end

-- How many failed and waiting rows are about to become pending: those of an earlier epoch.
function queue.count_late(epoch)
  local ends = struct.pack('>I4', epoch)
  return call('ZLEXCOUNT', keys.kept, '-', '(\0' .. ends)
      + call('ZLEXCOUNT', keys.kept, '[\1', '(\1' .. ends)
end

-- How many rows are not at rest, and pages of the worklist.
function queue.count_unfinished(epoch)
  local number = queue.count_late(epoch)
  for _, key in ipairs({keys.pending, keys.suspects, keys.leased, keys.worklist}) do
    number = number + call('ZCARD', key)
  end
  return number
end

-- Makes a row that was in flight pending again, or a suspect.
function queue.put_back(row)
  row.state = queue.QUEUED
  queue.set_flag(row, queue.WAS_TAKEN, true)
  queue.put(row, queue.is_suspect(row) and keys.suspects or keys.pending)
end

-- Makes the requests of a worker pending again, but one that has killed it alone dead. Returns the
-- number of the pending ones, and whether no more are left.
-- If there are too many for one script, the next check for expired leases finds the rest.
function queue.give_back(worker, is_blamed)
  local last = call('HGET', keys.workers, worker .. ':number')
  if tonumber(last) then
    call('HSET', keys.workers, worker .. ':number', 'gone ' .. last .. ' ' .. now)
  end
  local members = call('HGET', keys.filter, 'members') or ''
  local from, to = string.find(members, worker, 1, true)
  if from then
    members = string.sub(members, 1, from - 1) .. string.sub(members, to + 1)
    call('HSET', keys.filter, 'members', members)
  end
  if not is_blamed then call('HDEL', keys.workers, worker) end
  if call('HGET', keys.filter, 'start') == worker then call('HDEL', keys.filter, 'start') end
  local suspect, given = is_blamed and call('HGET', keys.workers, worker .. ':suspect'), 0
  while queue.may_move() do
    local entry = queue.first_with(keys.leased, worker)
    if not entry then
      call('HDEL', keys.workers, worker, worker .. ':name', worker .. ':suspect', worker .. ':done',
           worker .. ':lease', worker .. ':answers', worker .. ':asked')
      -- If it has only been away, it shall end when it is back.
      if not is_blamed then call('HDEL', keys.workers, worker .. ':stop') end
      return given, true
    end
    local row = queue.row_of(keys.leased, entry)
    if row and suspect and suspect == string.sub(entry, 17, 24) then
      row.state = queue.DEAD
      call('HSET', keys.workers, worker .. ':dead', row.id)
      queue.put(row, keys.dead)
      died[#died + 1] = row.data
    elseif row then
      if is_blamed and not suspect and #row.died < 4080 then row.died = row.died .. worker end
      queue.put_back(row)
      given = given + 1
    end
  end
  return given, false
end

function queue.note_start()
  call('HSET', keys.filter, 'start_at', call('HGET', keys.filter, 'numbered') or 0)
end

return queue
