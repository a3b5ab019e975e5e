-- What the scripts of a queue share: its keys, and the layout of its rows. See `redis.layout`.
--
-- KEYS: those of `redis.layout.KEYS`, in this order.
local call = redis.call
local MOST_DEATHS, MOST_TRIES = 3, 5
local QUEUED, WAITING, FAILED, DEAD = 'p', 'w', 'f', 'd'  -- states of a row
local IS_START, NEWEST_FIRST, WAS_TAKEN = 's', 'n', 't'  -- flags of a row

-- Functions are in tables: each local variable of which a function knows costs time in each script.
local queue = {keys = {}, gone = {}, died = {}, STATES = {QUEUED, WAITING, FAILED, DEAD}}
local keys, gone, died, dropped = queue.keys, queue.gone, queue.died, {}
for place, name in ipairs({'filter', 'rows', 'pending', 'leased', 'suspects', 'kept', 'waiting',
                           'dead', 'unreadable', 'open', 'worklist', 'runs', 'workers'}) do
  keys[name] = KEYS[place]
end
-- Each row is in one of these sets, so that a lost key is noticed.
queue.SETS = {keys.pending, keys.leased, keys.suspects, keys.kept, keys.dead, keys.unreadable}

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

function queue.first_of(key, prefix)
  return call('ZRANGEBYLEX', key, '[' .. prefix, '(' .. prefix .. '\255', 'LIMIT', 0, 1)[1]
end

-- Returns the beginning of the members of a page: a page may be the beginning of another one.
function queue.prefixed(page)
  return struct.pack('>I4c0', #page, page)
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

function queue.packed_row(row)
  return cmsgpack.pack({
    row.state, row.tries, row.epoch, row.position, row.flags, row.order, row.page, row.waits_for,
    row.reason, row.hops, row.died, row.records, row.first, row.data,
  })
end

-- Returns the row of a member of a set; nil if it is gone. It counts as so many moves, usually 1.
function queue.row_of(key, member, moved)
  local id = string.sub(member, -8)
  local packed = not gone[id] and call('HGET', keys.rows, id)
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
    row.pages = row.page == '' and {} or {row.page}
    for _, hop in ipairs(row.hops) do table.insert(row.pages, hop) end
  end
  return row.pages
end

-- Gives rows numbers, and returns the last one.
function queue.next_number(count)
  return call('HINCRBY', keys.filter, 'numbered', count)
end

-- Returns the hash with which members of pending begin, so that shares of slots are ranges.
local hashes = {}
function queue.hash_of(row)
  local slot = string.sub(row.order, 1, -11)
  local hash = hashes[slot]
  if not hash then
    hash = struct.pack('>I4', tonumber(string.sub(redis.sha1hex(slot), 1, 8), 16))
    hashes[slot] = hash
  end
  return hash
end

-- Returns the member of a set, other than leased, that has a row.
function queue.member_of(key, row)
  if key == keys.kept then
    return (queue.has(row, IS_START) and '\1' or '\0') .. struct.pack('>I4', row.epoch) .. row.id
  end
  if key ~= keys.pending and key ~= keys.suspects then return row.id end
  local position = queue.has(row, NEWEST_FIRST) and 2^53 - row.position or row.position
  return queue.hash_of(row) .. row.order .. struct.pack('>I8', position) .. row.id
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
  call('ZADD', keys.open, 0, queue.page_member(page, row))
end

function queue.unindex(row, pages)
  for _, page in ipairs(pages) do call('ZREM', keys.open, queue.page_member(page, row)) end
end

-- Stores a row that has changed, and moves it to another set.
function queue.put(row, key)
  local member = queue.member_of(key, row)
  call('HSET', keys.rows, row.id, queue.packed_row(row))
  call('ZADD', key, 0, member)
  if row.key then call('ZREM', row.key, row.member) end
  row.key, row.member = key, member
end

-- Removes what only a failed or waiting row has.
function queue.unkeep(row)
  if row.key == keys.kept and row.state == WAITING then
    call('ZREM', keys.waiting, queue.waiting_for(row.waits_for, row.epoch) .. row.id)
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
  queue.add_dropped(keys.rows, row.id)
  for _, page in ipairs(queue.pages_of(row)) do
    queue.add_dropped(keys.open, queue.page_member(page, row))
  end
  queue.add_dropped(row.key, row.member)
end

-- The sets that have the rows come last, so that nothing stays in the hash alone.
function queue.drop_now()
  if not dropped[keys.rows] then return end
  call('HINCRBY', keys.filter, 'done', #dropped[keys.rows])
  call('HDEL', keys.rows, unpack(dropped[keys.rows]))
  for key, members in pairs(dropped) do
    if key ~= keys.rows then call('ZREM', key, unpack(members)) end
  end
  dropped = {}
end

-- Makes a row pending as it first entered, or dead.
function queue.try_again(row, tries)
  queue.unkeep(row)
  queue.unindex(row, row.hops)
  local first = row.first
  if first ~= '' then
    local ends = string.find(first, '\0', 1, true) + 9
    row.order, row.first, row.data = string.sub(first, 1, ends), '', string.sub(first, ends + 2)
    queue.set_flag(row, NEWEST_FIRST, string.byte(first, ends + 1) == 1)
  end
  row.tries, row.epoch, row.waits_for = tries, 0, ''
  if tries < MOST_TRIES then row.reason = '' end
  row.hops, row.died, row.records, row.pages = {}, '', {}, nil
  row.position = queue.next_number(1)
  row.state = tries < MOST_TRIES and QUEUED or DEAD
  queue.put(row, row.state == DEAD and keys.dead or keys.pending)
end

function queue.deaths_of(row)
  local number = 0
  for at = 1, #row.died, 16 do
    if call('HEXISTS', keys.workers, string.sub(row.died, at, at + 15) .. ':back') == 0 then
      number = number + 1
    end
  end
  return number
end

-- How many failed and waiting rows are about to become pending: those of an earlier epoch.
function queue.count_late(epoch)
  local ends = struct.pack('>I4', epoch)
  return call('ZLEXCOUNT', keys.kept, '-', '(\0' .. ends)
      + call('ZLEXCOUNT', keys.kept, '[\1', '(\1' .. ends)
end

-- How many rows are not at rest, and pages of the worklist.
function queue.count_left(epoch)
  return call('ZCARD', keys.pending) + call('ZCARD', keys.suspects) + call('ZCARD', keys.leased)
      + call('ZCARD', keys.worklist) + queue.count_late(epoch)
end

-- Makes a row that was in flight pending again, or a suspect.
function queue.put_back(row)
  row.state = QUEUED
  queue.set_flag(row, WAS_TAKEN, true)
  queue.put(row, queue.deaths_of(row) < MOST_DEATHS and keys.pending or keys.suspects)
end

-- Removes a worker from those that ask for requests.
function queue.remove_member(worker)
  local members = call('HGET', keys.filter, 'members') or ''
  local at = string.find(members, worker, 1, true)
  if at then
    members = string.sub(members, 1, at - 1) .. string.sub(members, at + #worker)
    call('HSET', keys.filter, 'members', members)
  end
end

-- Makes the requests of a worker pending again, but one that has killed it alone dead. Returns the
-- number of the pending ones, and whether no more are left.
-- If there are too many for one script, the next check for expired leases finds the rest.
function queue.give_back(worker, is_blamed)
  local last = call('HGET', keys.workers, worker .. ':number')
  if tonumber(last) then
    call('HSET', keys.workers, worker .. ':number', string.format('gone %s %.0f', last, now))
  end
  queue.remove_member(worker)
  if not is_blamed then call('HDEL', keys.workers, worker) end
  if call('HGET', keys.filter, 'start') == worker then call('HDEL', keys.filter, 'start') end
  local suspect, given = is_blamed and call('HGET', keys.workers, worker .. ':suspect'), 0
  while queue.may_move() do
    local entry = queue.first_of(keys.leased, worker)
    if not entry then
      call('HDEL', keys.workers, worker, worker .. ':name', worker .. ':suspect', worker .. ':done',
           worker .. ':lease', worker .. ':answers', worker .. ':asked')
      -- If it has only been away, it shall end when it is back.
      if not is_blamed then call('HDEL', keys.workers, worker .. ':stop') end
      return given, true
    end
    local row = queue.row_of(keys.leased, entry)
    if row and suspect and suspect == string.sub(entry, 17, 24) then
      row.state = DEAD
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

function queue.alive_but(worker)
  local alive, all = 0, call('HGETALL', keys.workers)
  for index = 1, #all, 2 do
    if #all[index] == 16 and all[index] ~= worker and tonumber(all[index + 1]) >= now then
      alive = alive + 1
    end
  end
  return alive
end

return queue
