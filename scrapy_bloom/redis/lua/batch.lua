-- Uses: queue, bloom, visits
-- Apply a batch to a filter and its queue; `queues.store` has the rules.
--
-- A repeated batch, whose reply was lost, gets a reply without places, dead requests and circles.
--
-- KEYS: those of `redis.layout.KEYS`. ARGV: the `id` of the filter, and
--   version       of its generations
--   run, worker   ids
--   number        the number of the batch
--   lease         the duration of the lease in ms
--   count_field   the field of the newest generation's count
--   generations   the generations, oldest first, as `bloom` gets them
--   keeps_failed  whether failed and waiting rows are kept
--   entered       requests that enter the queue, each with its `flags` (letters), `order` (slot,
--                 NUL, priority, rank), `data`, `fingerprint`, the `bits` of that, the bits of that
--                 in this run (`once`) if it has the flag for that, the member of leased that it
--                 `replaces`, and `records`; what it has not is ''
--   recorded      bits of fingerprints that are recorded without a request
--   ended         requests that have ended, each with its member of leased (`entry`), `how` (an
--                 `End`), `reason`, the pages on whose ends it depends (`awaits`), its `pages` that
--                 are done, and `records`
--   want, stands_still, may_start, start_ended, is_over, shares, and downloads (by slots with their
--                 hashes): as `queues.store.Batch` has them
-- `records` are bits to be recorded if a row is done: of each of its pages, and of that page in
-- this run if it is new once in each run, else ''.
--
-- Returns the status 'back' if the batch has another number than the next or the last one, 'lost'
-- if the server has lost keys, 'version' if the generations have changed, 'again' if the batch must
-- be sent again, and 'run' if another run has begun: `run`, `run_name` and `began` as `join` has
-- them. Else it has added, pending, unfinished, runs_start, is_started, died, given_up, circles,
-- is_stopped, workers and rank as `queues.store.Reply` has them, and
--   queued        for each request that entered, whether it was queued, as '1' or '0'
--   places        for each fingerprint that entered, that of its run after it, and each recorded
--                 one: the place of a generation that has it now; 0: none
--   count         how many requests are recorded in the newest generation
--   taken         for each request that this batch has taken: {member of leased, row}
--   pushed, done  how many requests have entered the queue, and have left it
--   ended         when the queue became empty, in ms; 0: it is not
--   expired       {name, number of requests} of each worker whose lease has expired
--   cursor        where to begin in pending the next time; '': as before
local keys, now, died = queue.keys, queue.now, queue.died
local rules, batch = {}, visits.batch
local me, number, lease, want = given.worker, given.number, given.lease, given.want
local state = queue.read_state('version', 'run', 'run_name', 'began', 'epoch', 'adds_tries',
                               'pushed', 'done', 'start', 'start_at', 'look', given.count_field)
local mine = call('HMGET', keys.workers, me, me .. ':number', me .. ':answers', me .. ':suspect',
                  me .. ':stop')
local lasts_until, last = tonumber(mine[1]), tonumber(mine[2])
if not last or number < last or number > last + 1 then return reply({status = 'back'}) end
-- Each row is in one of these sets, so that a lost key is noticed.
local num_rows, sizes = 0, {}
for _, name in ipairs({'pending', 'leased', 'suspects', 'kept', 'dead', 'unreadable'}) do
  sizes[name] = call('ZCARD', keys[name])
  num_rows = num_rows + sizes[name]
end
local missing = (tonumber(state.pushed) or 0) - (tonumber(state.done) or 0)
    - math.min(num_rows, call('HLEN', keys.rows))
if missing > 0 then return reply({status = 'lost'}) end
local is_retry = number == last
if state.version ~= given.version and not is_retry then return reply({status = 'version'}) end
if (state.run or '') ~= given.run and not is_retry then
  return reply({status = 'run', run = state.run or '', run_name = state.run_name or '',
                began = tonumber(state.began) or 0})
end
if missing < 0 then  -- a script failed half-way
  call('HINCRBY', keys.filter, 'pushed', -missing)
end

local asks, cursor = want > 0 or given.may_start, ''
local count, places, queued, expired = state[given.count_field] or 0, {}, {}, {}
batch.state, batch.adds_tries = state, state.adds_tries == '0' and 0 or 1
batch.is_started = state.start == 'done' or (given.start_ended and state.start == me)
batch.has_kept = sizes.kept + sizes.dead > 0
batch.has_work = call('EXISTS', keys.worklist) == 1
batch.suspect = mine[4]

-- Returns what this batch has taken: members of leased, each with its row.
function rules.taken_by_this()
  local numbered, taken = me .. struct.pack('>I6', number), {}
  local entries = call('ZRANGEBYLEX', keys.leased, '[' .. numbered, '(' .. numbered .. '\255')
  for _, entry in ipairs(entries) do
    local packed = call('HGET', keys.rows, string.sub(entry, -8))
    if packed then taken[#taken + 1] = {entry, packed} end
  end
  return taken
end

function rules.answer(answers, taken)
  if bloom.recorded > 0 then
    count = call('HINCRBY', keys.filter, given.count_field, bloom.recorded)
  end
  local after = queue.read_state('pushed', 'done', 'start', 'ended', 'members')
  local members, asked = after.members or '', asks and {me .. ':asked', now} or {}
  if asks and not string.find(members, me, 1, true) then
    members = members .. me
    call('HSET', keys.filter, 'members', members)
  end
  local at = string.find(members, me, 1, true)
  local were_queued, number_added = string.match(answers, '^(%d*) (%d+)$')
  call('HSET', keys.workers, me, now + lease, me .. ':answers', answers, me .. ':number', number,
       unpack(asked))
  return reply({
    queued = were_queued, added = tonumber(number_added),
    places = places, count = tonumber(count), taken = taken,
    runs_start = after.start == me, is_started = after.start == 'done',
    unfinished = queue.count_unfinished(state.epoch), pending = call('ZCARD', keys.pending),
    pushed = tonumber(after.pushed) or 0, done = tonumber(after.done) or 0,
    ended = tonumber(after.ended) or 0, died = died, given_up = batch.given_up,
    circles = batch.circles, expired = expired, is_stopped = mine[5] ~= false,
    cursor = cursor, workers = #members / #me, rank = at and (at - 1) / #me or -1,
  })
end

if is_retry then
  return rules.answer(mine[3] or ' 0', rules.taken_by_this())
end

-- Makes keys in which bits may be set: each takes 50 us, so after many, the batch is refused.
function rules.make_keys()
  local function make(bits)
    if bits ~= '' and bloom.made < 48 then bloom.make_for(bits) end
  end
  for _, new in ipairs(given.entered) do
    make(new.bits)
    make(new.once)
  end
  for _, bits in ipairs(given.recorded) do make(bits) end
  for _, ended in ipairs(given.ended) do
    for _, bits in ipairs(ended.records) do make(bits) end
  end
end
rules.make_keys()
if bloom.made > 8 then return reply({status = 'again'}) end

if #given.entered > 0 then
  local last_number = call('HINCRBY', keys.filter, 'numbered', #given.entered)
  batch.numbered = last_number - #given.entered
end
for index, new in ipairs(given.entered) do
  queued[index] = visits.enter(new) and '1' or '0'
  if new.bits ~= '' then places[#places + 1] = new.place or 0 end
  if new.once ~= '' then places[#places + 1] = new.once_place or 0 end
end
if batch.pushed > 0 then call('HINCRBY', keys.filter, 'pushed', batch.pushed) end
for _, bits in ipairs(given.recorded) do
  places[#places + 1] = visits.record(bits)
end

local finished = 0
for _, ended in ipairs(given.ended) do
  if visits.end_row(ended) then finished = finished + 1 end
end
if finished > 0 then call('HINCRBY', keys.workers, me .. ':done', finished) end

-- Returns requests of workers that are not in the hash: they have left or rejoined, or were lost.
function rules.return_orphans()
  local from = '-'
  while queue.may_move() do
    local entry = queue.first_in(keys.leased, from, '+')
    if not entry then break end
    local worker = string.sub(entry, 1, 16)
    if call('HEXISTS', keys.workers, worker) == 0 then queue.give_back(worker, false) end
    -- An entry that no worker has written must not be read again and again.
    from = '(' .. (string.sub(entry, 17, 17) == '\255' and entry or worker .. '\255')
  end
  local start = call('HGET', keys.filter, 'start')
  if start and start ~= 'done' and call('HEXISTS', keys.workers, start) == 0 then
    call('HDEL', keys.filter, 'start')
  end
end

-- Keeps the members that have asked within half of the lease, at most 30 seconds.
function rules.keep_members(asked)
  local members, asking = call('HGET', keys.filter, 'members') or '', {}
  for at = 1, #members, #me do
    local worker = string.sub(members, at, at + #me - 1)
    local since = math.abs(now - (asked[worker] or 0))
    if (worker == me and asks) or since <= math.min(lease, 60000) / 2 then
      asking[#asking + 1] = worker
    end
  end
  call('HSET', keys.filter, 'members', table.concat(asking))
end

function rules.return_expired()
  local asked, all = {}, call('HGETALL', keys.workers)
  local is_empty = call('ZCARD', keys.pending) + call('ZCARD', keys.leased)
      + call('ZCARD', keys.suspects) == 0
  for index = 1, #all, 2 do
    local worker, field = string.sub(all[index], 1, 16), string.sub(all[index], 17)
    local value = tonumber(all[index + 1])
    if field == '' and #worker == 16 then
      if value > now + lease then  -- the clock went back
        call('HSET', keys.workers, worker, now + lease)
      elseif value < now and worker ~= me then
        local name = call('HGET', keys.workers, worker .. ':name') or '?'
        expired[#expired + 1] = {name, (queue.give_back(worker, true))}
      end
    elseif field == ':back' and is_empty then
      -- Before, the requests in which it seemed to die would count its death.
      call('HDEL', keys.workers, all[index])
    elseif field == ':asked' then
      asked[worker] = value
    elseif field == ':number' then
      local since = tonumber(string.match(all[index + 1], '^gone %d+ (%d+)$'))
      if since and math.abs(now - since) > 3600000 then  -- it will not come back
        call('HDEL', keys.workers, all[index], worker .. ':dead', worker .. ':stop')
      end
    end
  end
  rules.return_orphans()
  rules.keep_members(asked)
  return queue.may_move() and now + math.min(1000, lease / 4) or now
end

local look = tonumber(state.look)
if not lasts_until or lasts_until < now then
  -- All workers may have been unable to renew their leases, for example during an outage of the
  -- server. So the others get the time of a lease to renew theirs.
  call('HSET', keys.filter, 'look', now + lease)
elseif not look or look <= now or look > now + lease then
  call('HSET', keys.filter, 'look', rules.return_expired())
end

local taken_rows = rules.taken_by_this()  -- not empty if this batch has failed half-way before
local taken, has_before = #taken_rows, {}
for _, pair in ipairs(taken_rows) do has_before[string.sub(pair[1], -8)] = true end

local leases, opened, removed = {}, {}, {}  -- what `lease` writes
function rules.take(from, member)
  local row = queue.row_of(from, member)
  if not row then return false end
  removed[#removed + 1] = member
  if has_before[row.id] then return false end
  local token = struct.pack('>I6', number) .. struct.pack('>H', taken)
  local entry = me .. token .. row.id
  taken = taken + 1
  taken_rows[#taken_rows + 1] = {entry, row.packed}
  leases[#leases + 1], leases[#leases + 2] = 0, entry
  if row.page ~= '' and not queue.has(row, queue.WAS_TAKEN) then
    opened[#opened + 1], opened[#opened + 2] = 0, queue.prefixed(row.page) .. row.id
  end
  if from == keys.suspects then batch.suspect = token end
  return true
end

-- Moves the requests that were taken from a set. They are leased first: if the script fails
-- half-way, what is written for a request that is not leased would stay.
function rules.lease(from)
  if #removed == 0 then return end
  if #leases > 0 then call('ZADD', keys.leased, unpack(leases)) end
  if from == keys.suspects then call('HSET', keys.workers, me .. ':suspect', batch.suspect) end
  if #opened > 0 then call('ZADD', keys.open, unpack(opened)) end
  call('ZREM', from, unpack(removed))
  leases, opened, removed = {}, {}, {}
end

-- Returns, in the order of `shares`, the slots of pending or suspects from which this worker may
-- take requests, no more idle ones than it wants, and where it has stopped. To find a slot, its
-- first request is read, so their number is bounded.
function rules.slots_in_turn(key)
  local slots, idle, stop = {}, want - taken, ''
  local slots_to_read = 64
  for _, share in ipairs(given.shares) do
    local from, to = '[' .. share[1], '(' .. share[2]
    while idle > 0 and slots_to_read > 0 do
      local member = queue.first_in(key, from, to)
      stop = share[2]
      if not member then break end
      local slot = string.sub(member, 1, string.find(member, '\0', 5, true) - 1)
      slots_to_read, stop = slots_to_read - 1, slot .. '\1'
      from = '[' .. stop
      local downloads = given.downloads[slot] or 0
      local room = share[3] - downloads
      if room > 0 then
        slots[#slots + 1] = {name = slot, first = member, downloads = downloads, room = room}
        if downloads == 0 then idle = idle - 1 end
      end
    end
  end
  return slots, stop
end

-- Takes requests from the slots with the fewest downloads first, round-robin.
function rules.take_pending()
  local slots, stop = rules.slots_in_turn(keys.pending)
  local latest = 0
  while taken < want and queue.may_move() do
    local best, place
    for index = latest, latest + #slots - 1 do
      local slot = slots[index % #slots + 1]
      if slot.room > 0 and (not best or slot.downloads < best.downloads) then
        best, place = slot, index % #slots + 1
      end
    end
    if not best then break end
    -- Not by `first_with`, whose range ends before a priority that begins with a byte of 255.
    local from, to = '[' .. best.name .. '\0', '(' .. best.name .. '\1'
    local member = best.first
        or call('ZRANGEBYLEX', keys.pending, from, to, 'LIMIT', best.taken, 1)[1]
    best.first, best.downloads = nil, best.downloads + 1
    best.room, best.taken = best.room - 1, (best.taken or 0) + 1
    if member and rules.take(keys.pending, member) then
      latest, cursor = place, best.name .. '\1'
    else
      best.room = 0
    end
  end
  if latest == 0 then cursor = stop end
end

function rules.take_suspect()
  for _, slot in ipairs(rules.slots_in_turn(keys.suspects)) do
    local row = queue.row_of(keys.suspects, slot.first)
    if row and queue.is_suspect(row) then
      rules.take(keys.suspects, slot.first)
      rules.lease(keys.suspects)
    elseif row then
      queue.put(row, keys.pending)
    end
    if row then return end
  end
end

visits.end_waiting(want)
if call('ZCARD', keys.pending) == 0 then visits.retry_late(want) end
if want > taken and (given.stands_still or not batch.suspect) then
  rules.take_pending()
  rules.lease(keys.pending)
  if call('ZCARD', keys.pending) == 0 and taken == 0
      and queue.count_late(state.epoch) == 0
      and (given.stands_still or not queue.first_with(keys.leased, me)) then
    rules.take_suspect()
  end
end
visits.end_waiting()
visits.retry_late()

local start = call('HGET', keys.filter, 'start')
if given.start_ended and start == me then
  start = 'done'
  call('HSET', keys.filter, 'start', start)
elseif given.may_start and not start then
  call('HSET', keys.filter, 'start', me)
  queue.note_start()
end
if queue.count_unfinished(state.epoch) > 0 or start ~= 'done' then
  call('HDEL', keys.filter, 'ended')
elseif given.is_over then
  call('HSETNX', keys.filter, 'ended', now)
end
if bloom.lost then return reply({status = 'lost'}) end
return rules.answer(table.concat(queued) .. ' ' .. batch.added, taken_rows)
