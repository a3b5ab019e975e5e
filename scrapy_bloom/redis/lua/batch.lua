-- Uses: queue, bloom, visits
-- Apply a batch to a filter and its queue; `queues.store` has the rules.
--
-- A repeated batch, whose reply was lost, gets a reply without places, dead requests and circles.
--
-- KEYS: those of `redis.layout.KEYS`. ARGV: a map:
--   id, version   of the filter and its generations
--   run, worker   ids
--   number        the number of the batch
--   lease         the duration of the lease in ms
--   count_field   the field of the newest generation's count
--   generations   the generations, oldest first, as `bloom` gets them
--   keeps_failed  whether failed and waiting rows are kept
--   entered       requests that enter the queue:
--     flags         its flags (letters)
--     order         slot, NUL, priority, rank
--     data          the serialized request
--     fingerprint   its fingerprint; '': it has none
--     bits          the bits of its fingerprint
--     once          those of its fingerprint in this run, if it has the flag for that, else ''
--     replaces      the member of leased that it replaces, or ''
--     records       bits to be recorded if the row is done: of each of its pages, and of that page
--                   in this run if it is new once in each run, else ''
--   recorded      bits of fingerprints that are recorded without a request
--   ended         requests that have ended:
--     entry         its member of leased
--     how           'done', 'taken over', 'failed', 'returned' or 'unreadable'
--     reason        of a failed request: why
--     awaits        pages on whose ends it depends
--     pages         its page and hops; of one that was taken over, its page
--     records       as above
--   want, stands_still, may_start, start_ended, is_over: as `queues.store.Batch` has them
--   downloads, own_shares: likewise, each as a list of lists: a slot (with its hash), and a number
--   shares        ranges of members of pending: first, last, and number
--
-- Returns a map. Its status is
--   'other'       the filter has another id
--   'back'        the batch has another number than the next or the last one
--   'lost'        the server has lost keys
--   'version'     the generations have changed
--   'run'         another run has begun: `run`, `run_name` and `began` as `join` has them
--   'ok'          with added, pending, left, died, given_up, circles, is_stopped and rank as
--                 `queues.store.Reply` has them, and
--     queued        for each request that entered, whether it was queued, as '1' or '0'
--     places        for each fingerprint that entered, that of its run after it, and each recorded
--                   one: the place of a generation that has it now, as a character; 'n': none
--     count         how many requests are recorded in the newest generation
--     taken         for each request that this batch has taken: member of leased, row
--     start         the worker that runs start(), or 'done'
--     pushed, done  how many requests have entered the queue, and have left it
--     ended         when the queue became empty, in ms; 0: it is not
--     expired       name and number of requests of each worker whose lease has expired
--     cursor        where to begin in pending the next time; '': as before
--     members       how many workers ask for requests
local call, keys, now, died = redis.call, queue.keys, queue.now, queue.died
local MOST_DEATHS, WAS_TAKEN = 3, 't'
local rules, given = {}, cmsgpack.unpack(ARGV[1])
bloom = bloom(given.generations)
local function refusal(status)
  return cmsgpack.pack({status = status})
end
local me, number, lease, want = given.worker, given.number, given.lease, given.want
local state = queue.read_state('id', 'version', 'run', 'run_name', 'began', 'epoch', 'adds_tries',
                               'pushed', 'done', 'start', 'start_at', given.count_field)
if state.id ~= given.id then return refusal('other') end
local last = tonumber(call('HGET', keys.workers, me .. ':number'))
if not last or number < last or number > last + 1 then return refusal('back') end
local number_of_rows, sizes = 0, {}
for _, key in ipairs(queue.SETS) do
  sizes[key] = call('ZCARD', key)
  number_of_rows = number_of_rows + sizes[key]
end
local missing = (tonumber(state.pushed) or 0) - (tonumber(state.done) or 0)
    - math.min(number_of_rows, call('HLEN', keys.rows))
if missing > 0 then return refusal('lost') end
local is_retry = number == last
if state.version ~= given.version and not is_retry then return refusal('version') end
if (state.run or '') ~= given.run and not is_retry then
  return cmsgpack.pack({
    status = 'run', run = state.run or '', run_name = state.run_name or '',
    began = tonumber(state.began) or 0,
  })
end

if missing < 0 then  -- a script failed half-way
  call('HINCRBY', keys.filter, 'pushed', -missing)
end

local asks, cursor = want > 0 or given.may_start, ''
local count, places, queued, expired = state[given.count_field] or 0, {}, {}, {}
local batch = {
  given = given, state = state, added = 0, pushed = 0, given_up = 0, circles = {},
  adds_tries = state.adds_tries == '0' and 0 or 1,
  is_started = state.start == 'done' or (given.start_ended and state.start == me),
  has_kept = sizes[keys.kept] + sizes[keys.dead] > 0,
  has_work = call('EXISTS', keys.worklist) == 1,
  suspect = call('HGET', keys.workers, me .. ':suspect'),
}
visits = visits(batch)

-- Returns what this batch has taken: members of leased, each before its row.
function rules.taken_by_this()
  local numbered, taken = me .. struct.pack('>I6', number), {}
  local entries = call('ZRANGEBYLEX', keys.leased, '[' .. numbered, '(' .. numbered .. '\255')
  for _, entry in ipairs(entries) do
    local packed = call('HGET', keys.rows, string.sub(entry, -8))
    if packed then taken[#taken + 1], taken[#taken + 2] = entry, packed end
  end
  return taken
end

function rules.reply(answers, taken)
  if bloom.recorded > 0 then
    count = call('HINCRBY', keys.filter, given.count_field, bloom.recorded)
  end
  local asked = asks and {me .. ':asked', now} or {}
  call('HSET', keys.workers, me, now + lease, me .. ':answers', answers, me .. ':number', number,
       unpack(asked))
  local after = queue.read_state('pushed', 'done', 'start', 'ended', 'members')
  local members = after.members or ''
  local at = string.find(members, me, 1, true)
  local queued_ones, number_added = string.match(answers, '^(%d*) (%d+)$')
  return cmsgpack.pack({
    status = 'ok', queued = queued_ones, added = tonumber(number_added),
    places = table.concat(places), count = tonumber(count), taken = taken,
    start = after.start or '', left = queue.count_left(state.epoch),
    pending = call('ZCARD', keys.pending),
    pushed = tonumber(after.pushed) or 0, done = tonumber(after.done) or 0,
    ended = tonumber(after.ended) or 0, died = died, given_up = batch.given_up,
    circles = batch.circles, expired = expired,
    is_stopped = call('HEXISTS', keys.workers, me .. ':stop') == 1,
    cursor = cursor, members = #members / #me, rank = at and (at - 1) / #me or -1,
  })
end

if is_retry then
  return rules.reply(call('HGET', keys.workers, me .. ':answers') or ' 0', rules.taken_by_this())
end

if #given.entered > 0 then
  batch.numbered = queue.next_number(#given.entered) - #given.entered
end
for index, new in ipairs(given.entered) do
  queued[index] = visits.enter(new) and '1' or '0'
  if new.bits ~= '' then places[#places + 1] = bloom.letter(new.place or 0) end
  if new.once ~= '' then places[#places + 1] = bloom.letter(new.once_place or 0) end
end
if batch.pushed > 0 then call('HINCRBY', keys.filter, 'pushed', batch.pushed) end
for _, bits in ipairs(given.recorded) do
  local place = bloom.look_up(bits)
  if place == 0 then
    batch.added = batch.added + 1
    place = bloom.record(bits)
  end
  places[#places + 1] = bloom.letter(place)
end

local finished = 0
for _, ended in ipairs(given.ended) do
  if visits.end_row(ended) then finished = finished + 1 end
end
if finished > 0 then call('HINCRBY', keys.workers, me .. ':done', finished) end
queue.drop_now()

-- Returns requests of workers that are not in the hash: they have left or rejoined, or were lost.
function rules.return_orphans(known)
  table.sort(known)
  local from = '-'
  for index = 1, #known + 1 do
    local to = known[index] and '(' .. known[index] or '+'
    while queue.may_move() do
      local entry = call('ZRANGEBYLEX', keys.leased, from, to, 'LIMIT', 0, 1)[1]
      if not entry then break end
      queue.give_back(string.sub(entry, 1, 16), false)
    end
    from = '(' .. (known[index] or '') .. '\255'
  end
  local start = call('HGET', keys.filter, 'start')
  if start and start ~= 'done' and call('HEXISTS', keys.workers, start) == 0 then
    call('HDEL', keys.filter, 'start')
  end
end

-- Keeps the members that have asked within half of the lease, at most 30 seconds.
function rules.keep_members(asked)
  local members, kept = call('HGET', keys.filter, 'members') or '', {}
  for at = 1, #members, #me do
    local worker = string.sub(members, at, at + #me - 1)
    local since = math.abs(now - (asked[worker] or 0))
    if (worker == me and asks) or since <= math.min(lease, 60000) / 2 then
      kept[#kept + 1] = worker
    end
  end
  if #kept * #me < #members then call('HSET', keys.filter, 'members', table.concat(kept)) end
end

function rules.return_expired()
  local known, asked, all = {}, {}, call('HGETALL', keys.workers)
  local is_empty = call('ZCARD', keys.pending) + call('ZCARD', keys.leased)
      + call('ZCARD', keys.suspects) == 0
  for index = 1, #all, 2 do
    local name, ends = all[index], tonumber(all[index + 1])
    if #name == 16 then
      known[#known + 1] = name
      if ends > now + lease then  -- the clock went back
        call('HSET', keys.workers, name, now + lease)
      elseif ends < now and name ~= me then
        expired[#expired + 1] = call('HGET', keys.workers, name .. ':name') or '?'
        expired[#expired + 1] = queue.give_back(name, true)
      end
    elseif string.sub(name, 17) == ':back' then
      -- Without it, the requests in which it seemed to die would count its death.
      if is_empty then call('HDEL', keys.workers, name) end
    elseif string.sub(name, 17) == ':asked' then
      asked[string.sub(name, 1, 16)] = tonumber(all[index + 1])
    elseif string.sub(name, 17) == ':number' then
      local since = tonumber(string.match(all[index + 1], '^gone %d+ (%d+)$'))
      if since and math.abs(now - since) > 3600000 then  -- it will not come back
        local worker = string.sub(name, 1, 16)
        call('HDEL', keys.workers, name, worker .. ':dead', worker .. ':stop')
      end
    end
  end
  rules.return_orphans(known)
  rules.keep_members(asked)
  return queue.may_move() and now + math.min(1000, lease / 4) or now
end

local lasts_until = tonumber(call('HGET', keys.workers, me))
local look = tonumber(call('HGET', keys.filter, 'look'))
if not lasts_until or lasts_until < now then
  -- All workers may have been unable to renew their leases, for example during an outage of the
  -- server. So the others get the time of a lease to renew theirs.
  call('HSET', keys.filter, 'look', now + lease)
elseif not look or look <= now or look > now + lease then
  call('HSET', keys.filter, 'look', rules.return_expired())
end
local members = call('HGET', keys.filter, 'members') or ''
if asks and not string.find(members, me, 1, true) then
  call('HSET', keys.filter, 'members', members .. me)
end

local busy, own = {}, {}
for _, downloads in ipairs(given.downloads) do busy[downloads[1]] = downloads[2] end
for _, share in ipairs(given.own_shares) do own[share[1]] = share[2] end

local taken_ones = rules.taken_by_this()  -- not empty if this batch has failed half-way before
local taken, has_before = #taken_ones / 2, {}
for index = 1, #taken_ones, 2 do has_before[string.sub(taken_ones[index], -8)] = true end
local leases, opened, left = {}, {}, {}  -- what `lease` writes
function rules.take(from, member)
  local row = queue.row_of(from, member)
  if not row then return false end
  left[#left + 1] = member
  if has_before[row.id] then return false end
  local token = struct.pack('>I6', number) .. struct.pack('>H', taken)
  local entry = me .. token .. row.id
  taken = taken + 1
  taken_ones[#taken_ones + 1], taken_ones[#taken_ones + 2] = entry, row.packed
  leases[#leases + 1], leases[#leases + 2] = 0, entry
  if row.page ~= '' and not queue.has(row, WAS_TAKEN) then
    opened[#opened + 1], opened[#opened + 2] = 0, queue.page_member(row.page, row)
  end
  if from == keys.suspects then batch.suspect = token end
  return true
end

-- Moves the requests that were taken from a set. They are leased first: if the script fails
-- half-way, what is written for a request that is not leased would stay.
function rules.lease(from)
  if #left == 0 then return end
  if #leases > 0 then call('ZADD', keys.leased, unpack(leases)) end
  if from == keys.suspects then call('HSET', keys.workers, me .. ':suspect', batch.suspect) end
  if #opened > 0 then call('ZADD', keys.open, unpack(opened)) end
  call('ZREM', from, unpack(left))
  leases, opened, left = {}, {}, {}
end

-- Returns the first member of a range of pending or suspects, and hash and name of its slot.
function rules.slot_in(key, from, to)
  local member = call('ZRANGEBYLEX', key, from, to, 'LIMIT', 0, 1)[1]
  return member, member and string.sub(member, 1, string.find(member, '\0', 5, true) - 1)
end

-- Returns, in the order of `shares`, the slots from which this worker may take requests, no more
-- idle ones than it wants, and where it has stopped. To find a slot, its first request is read, so
-- their number is bounded.
function rules.slots_in_turn()
  local slots, idle, stop = {}, want - taken, ''
  local slots_to_read, bytes_to_read = 64, 262144
  for _, share in ipairs(given.shares) do
    local from, to = '[' .. share[1], '(' .. share[2]
    while idle > 0 and slots_to_read > 0 and bytes_to_read > 0 do
      local member, slot = rules.slot_in(keys.pending, from, to)
      slots_to_read, stop = slots_to_read - 1, share[2]
      if not member then break end
      bytes_to_read, stop = bytes_to_read - #member, slot .. '\1'
      from = '[' .. stop
      local downloads = busy[slot] or 0
      local room = (own[slot] or share[3]) - downloads
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
  local slots, stop = rules.slots_in_turn()
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
    -- Not by `first_of`, whose range ends before a priority that begins with a byte of 255.
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
  local row, member, slot
  for _, share in ipairs(given.shares) do
    local to = '(' .. share[2]
    member, slot = rules.slot_in(keys.suspects, '[' .. share[1], to)
    while slot and own[slot] == 0 do
      member, slot = rules.slot_in(keys.suspects, '[' .. slot .. '\1', to)
    end
    row = member and queue.row_of(keys.suspects, member)
    if row then break end
  end
  -- Workers that seemed to have died may have rejoined, so that their deaths do not count.
  if row and queue.deaths_of(row) >= MOST_DEATHS then
    rules.take(keys.suspects, member)
    rules.lease(keys.suspects)
  elseif row then
    queue.put(row, keys.pending)
  end
end

visits.end_waiting(want)
queue.drop_now()
if call('ZCARD', keys.pending) == 0 then visits.retry_late(want) end
if want > taken and (given.stands_still or not batch.suspect) then
  rules.take_pending()
  rules.lease(keys.pending)
  if call('ZCARD', keys.pending) == 0 and taken == 0
      and queue.count_late(state.epoch) == 0
      and (given.stands_still or not queue.first_of(keys.leased, me)) then
    rules.take_suspect()
  end
end
visits.end_waiting()
queue.drop_now()
visits.retry_late()

local start = call('HGET', keys.filter, 'start')
if given.start_ended and start == me then
  start = 'done'
  call('HSET', keys.filter, 'start', start)
elseif given.may_start and not start then
  call('HSET', keys.filter, 'start', me)
  queue.note_start()
end
if queue.count_left(state.epoch) > 0 or start ~= 'done' then
  call('HDEL', keys.filter, 'ended')
elseif given.is_over then
  call('HSETNX', keys.filter, 'ended', now)
end
if bloom.is_lost then return refusal('lost') end
return rules.reply(table.concat(queued) .. ' ' .. batch.added, taken_ones)
