"""Lua scripts that apply a batch to a filter and its queue, or to a filter alone.

`scrapy_bloom.redis.scripts` documents the keys and the layout of a row, `scrapy_bloom.queues.store`
the rules of a batch.
"""

from scrapy_bloom.filters.sizing import BLOCK_BITS, BLOCK_BYTES
from scrapy_bloom.redis.layout import BATCH as BATCH_FIELDS
from scrapy_bloom.redis.layout import BATCH_REPLY, lua_arguments, lua_reply
from scrapy_bloom.redis.layout import RECORD as RECORD_FIELDS
from scrapy_bloom.redis.scripts import BASE, CHUNK_BLOCKS, COMMON

_BITS = (
    f"local CHUNK_BLOCKS, BLOCK_BITS, BLOCK_BYTES = {CHUNK_BLOCKS}, {BLOCK_BITS}, {BLOCK_BYTES}"
    r"""
local bloom, generations, most = {}, given.generations, 0
for _, generation in ipairs(generations) do most = math.max(most, generation.num_hashes) end
local layout = '>' .. string.rep('H', 3 + most)

-- Returns the key of a generation that has the block of a fingerprint, the length of that key, and
-- the first bit of the block in it. The products of the block hash have too many bits for a number.
function bloom.block_of(words, generation)
  local number, block = generation.num_blocks, 0
  for index = 3, 1, -1 do block = math.floor((block + words[index] * number) / 65536) end
  local chunk = math.floor(block / CHUNK_BLOCKS)
  local before = chunk * CHUNK_BLOCKS
  return {
    key = generation.prefix .. chunk,
    length = math.min(number - before, CHUNK_BLOCKS) * BLOCK_BYTES,
    first = (block - before) * BLOCK_BITS,
  }
end

local located = {}
function bloom.locate(bits)
  local found = located[bits]
  if not found then
    found = {words = {struct.unpack(layout, bits)}}  -- three of the block hash, and the positions
    for place, generation in ipairs(generations) do
      found[place] = bloom.block_of(found.words, generation)
    end
    located[bits] = found
  end
  return found
end

local whole, is_lost = {}, false
function bloom.is_whole(block)
  if whole[block.key] == nil then
    whole[block.key] = call('STRLEN', block.key) == block.length
    is_lost = is_lost or not whole[block.key]
  end
  return whole[block.key]
end

function bloom.has_all(block, words, number)
  if not bloom.is_whole(block) then return false end
  for index = 4, number + 3 do
    if call('GETBIT', block.key, block.first + words[index]) == 0 then return false end
  end
  return true
end

-- Returns the place of the newest generation that has a fingerprint, 0 if none has.
function bloom.look_up(bits)
  local found = bloom.locate(bits)
  for place = #generations, 1, -1 do
    if bloom.has_all(found[place], found.words, generations[place].num_hashes) then return place end
  end
  return 0
end

-- Records a fingerprint in the newest generation, and returns the place of that. One command sets
-- the bits, because each command takes time.
local arguments, recorded = {}, 0
function bloom.record(bits)
  local found, place = bloom.locate(bits), #generations
  local block, last = found[place], 4 * generations[place].num_hashes
  if not bloom.is_whole(block) then return 0 end
  for index = 4, last, 4 do
    arguments[index - 3], arguments[index - 2], arguments[index] = 'SET', 'u1', '1'
    arguments[index - 1] = block.first + found.words[index / 4 + 3]
  end
  call('BITFIELD', block.key, unpack(arguments, 1, last))
  recorded = recorded + 1
  return place
end

function bloom.letter(place)
  return place == 0 and 'n' or string.char(place)
end
"""
)

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
for index, bits in ipairs(given.fingerprints) do
  local place = bloom.look_up(bits)
  answers[index] = bloom.letter(place)
  if place == 0 and given.records then bloom.record(bits) end
end
if is_lost then return {'lost'} end
if recorded > 0 then count = call('HINCRBY', filter, given.count_field, recorded) end
if is_numbered then call('HSET', filter, mirror, given.mirror_value) end
return {'ok', table.concat(answers), count}
"""

# A repeated batch, whose reply was lost, gets a reply without places, dead requests and circles.
_BATCH = r"""
local TO_ITSELF = 'it was redirected to itself'
local TO_OTHERS = 'it led to redirects to pages that are not done'
local me, batch, lease, want = given.worker, given.number, given.lease, given.want
local state = queue.read_state('id', 'version', 'run', 'run_name', 'began', 'kept', 'epoch',
                               'adds_tries', 'pushed', 'done', 'start', 'start_at',
                               given.count_field)
if state.id ~= given.id then return {'other'} end
local last = tonumber(call('HGET', workers, me .. ':number'))
if not last or batch < last or batch > last + 1 then return {'back'} end
local entries, sizes = 0, {}
for _, key in ipairs(SETS) do
  sizes[key] = call('ZCARD', key)
  entries = entries + sizes[key]
end
local missing = (tonumber(state.pushed) or 0) - (tonumber(state.done) or 0)
    - math.min(entries, call('HLEN', rows))
if missing > 0 then return {'lost'} end
local is_retry = batch == last
if state.version ~= given.version and not is_retry then return {'version'} end
if (state.run or '') ~= given.run and not is_retry then
  return {'run', state.run or '', state.run_name or '', state.began or '', state.kept or '0'}
end

if missing < 0 then call('HINCRBY', filter, 'pushed', -missing) end  -- a script failed half-way

local count, places, queued, added = state[given.count_field] or 0, {}, {}, 0
local died, circles, expired, given_up = {}, {}, {}, 0
local adds_tries = state.adds_tries == '0' and 0 or 1
local suspect = call('HGET', workers, me .. ':suspect')
local has_kept, has_work = sizes[kept] + sizes[dead] > 0, call('EXISTS', worklist) == 1
local is_started = state.start == 'done' or (given.start_ended and state.start == me)

-- Returns what this batch has taken: members of leased, each before its row.
function queue.taken_by_this()
  local numbered, taken = me .. struct.pack('>I6', batch), {}
  local entries = call('ZRANGEBYLEX', leased, '[' .. numbered, '(' .. numbered .. '\255')
  for _, entry in ipairs(entries) do
    local packed = call('HGET', rows, string.sub(entry, -8))
    if packed then taken[#taken + 1], taken[#taken + 2] = entry, packed end
  end
  return taken
end

function queue.count_left()
  return call('ZCARD', pending) + call('ZCARD', suspects) + call('ZCARD', leased)
      + call('ZCARD', worklist) + queue.count_late(kept, state.epoch)
end

function queue.reply(answers, taken)
  if recorded > 0 then count = call('HINCRBY', filter, given.count_field, recorded) end
  call('HSET', workers, me, now + lease, me .. ':answers', answers, me .. ':number', batch)
  local state = queue.read_state('pushed', 'done', 'start', 'ended')
  local queued_ones, number_added = string.match(answers, '^(%d*) (%d+)$')
  return replied({
    queued = queued_ones, added = tonumber(number_added), places = table.concat(places),
    count = count, taken = taken, start = state.start or '', left = queue.count_left(),
    pending = call('ZCARD', pending), pushed = state.pushed or 0, done = state.done or 0,
    ended = state.ended or '', died = died, given_up = given_up, circles = circles,
    expired = expired, is_stopped = call('HEXISTS', workers, me .. ':stop') == 1,
  })
end

if is_retry then
  return queue.reply(call('HGET', workers, me .. ':answers') or ' 0', queue.taken_by_this())
end
"""

_ROWS = r"""
function queue.is_in(list, text)
  for _, each in ipairs(list) do
    if each == text then return true end
  end
  return false
end

-- Returns the rows of the index that have a page, in the order in which they entered.
function queue.rows_with(page)
  local found, prefix = {}, queue.prefixed(page)
  for _, member in ipairs(call('ZRANGEBYLEX', open, '[' .. prefix, '(' .. prefix .. '\255')) do
    local id = string.sub(member, -8)
    local packed = not gone[id] and call('HGET', rows, id)
    local row = packed and queue.parsed_row(id, packed)
    if row and queue.is_in(queue.pages_of(row), page) then
      found[#found + 1] = row
      row.key = row.state == DEAD and dead or row.state == QUEUED and pending or kept
      row.member = queue.member_of(row.key, row)  -- pending may stand for others, like leased
    else
      call('ZREM', open, member)
    end
  end
  return found
end

-- Whether a row is about to become pending.
function queue.is_late(row)
  return row.key == kept and row.epoch < state.epoch
end

-- Returns whether a row, other than one, may still crawl a page, so that nobody knows its end.
function queue.is_open(page, but)
  for _, row in ipairs(queue.rows_with(page)) do
    local has_page = row.page == page or not queue.is_late(row)  -- which loses its hops
    if row.id ~= but and row.state ~= DEAD and has_page then return true end
  end
  return false
end

-- Returns the failed and dead rows that have a page as their own, and that another row may replace.
-- Those that are not filtered are sessions of their own.
function queue.failed_rows(page)
  local found = {}
  for _, row in ipairs(queue.rows_with(page)) do
    local has_failed = row.state == FAILED or row.state == DEAD
    if row.page == page and has_failed and queue.has(row, IS_FILTERED) then
      found[#found + 1] = row
    end
  end
  return found
end

function queue.drop_all(some)
  for _, row in ipairs(some) do queue.drop(row) end
end

-- Returns whether a request is in flight, as this worker has taken it.
function queue.has_taken(entry)
  local token = string.sub(entry, 17, 24)
  if string.sub(entry, 1, 16) ~= me or gone[string.sub(entry, -8)]
      or not call('ZSCORE', leased, entry) then
    return false
  end
  if suspect == token then
    suspect = nil
    call('HDEL', workers, me .. ':suspect')
  end
  return true
end

-- Returns the row of such a request.
function queue.in_flight(entry)
  local row = queue.has_taken(entry) and queue.row_of(leased, entry)
  moves = moves + 1  -- a batch has few of them
  if row then row.state, row.waits_for = QUEUED, '' end  -- if a script has failed half-way
  return row
end

-- Rows that end. `records` are bits: of a page, of that page in this run, of another page ...

-- Returns what is not recorded yet: nothing of a row without hops that has entered in this run.
function queue.missing_records(row, records)
  local is_complete = row.hops == '' and row.epoch == state.epoch and queue.has(row, IS_RECORDED)
  return is_complete and {} or records
end

function queue.record_all(records)
  for index, bits in ipairs(records) do
    local place = bits == '' and #generations or bloom.look_up(bits)
    if place == 0 and index % 2 == 1 then added = added + 1 end
    if place < #generations then bloom.record(bits) end
  end
end

function queue.finish(row, records, pages)
  queue.record_all(records)
  for _, page in ipairs(has_kept and pages or {}) do
    if queue.first_of(waiting, queue.waiting_for(page, state.epoch)) then
      call('ZADD', worklist, 0, page)
      has_work = true
    end
  end
  queue.drop(row)
  for _, page in ipairs(has_kept and queue.has(row, IS_FILTERED) and pages or {}) do
    queue.drop_all(queue.failed_rows(page))
  end
end

-- Ends rows that wait for pages that are done; spares so many moves.
function queue.end_waiting(spared)
  while has_work and queue.may_move(spared) do
    local page = call('ZRANGE', worklist, 0, 0)[1]
    local member = page and queue.first_of(waiting, queue.waiting_for(page, state.epoch))
    local row = member and queue.row_of(waiting, member)
    if row and row.state == WAITING and row.waits_for == page then
      row.key, row.member = kept, queue.member_of(kept, row)
      queue.finish(row, queue.parsed_texts(row.records), queue.pages_of(row))
    elseif row then
      call('ZREM', waiting, member)
    elseif not member and page then
      call('ZREM', worklist, page)
    end
    has_work = page ~= nil
  end
end

function queue.done(row, records, pages)
  queue.finish(row, records, pages or queue.pages_of(row))
  queue.end_waiting(want)
end

function queue.put_kept(row)
  has_kept, row.epoch = true, state.epoch
  queue.set_flag(row, WAS_TAKEN, true)
  if row.tries + 1 >= MOST_TRIES then
    call('ZADD', last_tries, 0, queue.member_of(kept, row))
  end
  if row.state == WAITING then
    call('ZADD', waiting, 0, queue.waiting_for(row.waits_for, row.epoch) .. row.id)
  end
  queue.put(row, kept)
end

-- Keeps a row as failed or waiting, or ends it, as the settings say.
function queue.keep(row, new_state, reason, records)
  if not given.keeps_failed then return queue.done(row, records) end
  local others = {}
  if new_state == FAILED and queue.has(row, IS_FILTERED) and row.page ~= '' then
    for _, other in ipairs(queue.failed_rows(row.page)) do
      if other.state == FAILED then row.tries = math.max(row.tries, other.tries) end
      if other.id ~= row.id then others[#others + 1] = other end
    end
  end
  row.state, row.reason = new_state, reason
  queue.put_kept(row)
  queue.drop_all(others)
end

function queue.wait(row, page, records)
  row.waits_for, row.records = page, queue.packed_texts(records)
  queue.keep(row, WAITING, '', records)
  if row.state ~= WAITING then return end
  local pages = queue.pages_of(row)
  for _, other in ipairs(queue.rows_with(page)) do
    if queue.is_in(pages, other.waits_for) and not queue.is_late(other) then
      queue.read_rest(row)
      circles[#circles + 1] = row.data
      return
    end
  end
end

-- Returns whether a request has left the queue.
function queue.end_row(ended)
  local entry, opened = ended.entry, {}
  local is_simple = not has_kept or #ended.pages == 0
  if ended.how == 'done' and #ended.awaits == 0 and #ended.records == 0 and is_simple then
    local is_there = queue.has_taken(entry)  -- nearly all requests: the row need not be read
    local row = {id = string.sub(entry, -8), key = leased, member = entry, pages = ended.pages,
                 flags = ''}
    if is_there then queue.done(row, {}) end
    return is_there
  end
  local row = queue.in_flight(entry)
  if not row then return false end
  local records = queue.missing_records(row, ended.records)
  for _, page in ipairs(ended.awaits) do
    local is_own = queue.is_in(queue.pages_of(row), page)
    if not is_own and queue.is_open(page, row.id) then opened[#opened + 1] = page end
  end
  if ended.how == 'unreadable' then
    queue.set_flag(row, WAS_TAKEN, true)
    queue.put(row, unreadable)
  elseif ended.how == 'failed' then
    queue.keep(row, FAILED, ended.reason, records)
  elseif ended.how == 'taken over' then
    queue.done(row, records, row.page ~= '' and {row.page} or {})
  elseif #opened > 1 then
    queue.keep(row, FAILED, TO_OTHERS, records)
  elseif #opened == 1 then
    queue.wait(row, opened[1], records)
  else
    queue.done(row, records)
  end
  return ended.how ~= 'unreadable'
end
"""

_ENTERED = r"""
-- Whether a request is recorded.
function queue.is_known(new)
  if new.once ~= '' then
    new.once_place = bloom.look_up(new.once)
    return new.once_place > 0
  end
  new.place = bloom.look_up(new.bits)
  return new.place > 0
end

-- Records a request, not before it is in the queue.
function queue.record_new(new)
  new.place = new.place or bloom.look_up(new.bits)
  if new.place == 0 then added = added + 1 end
  if new.place < given.lasting then new.place = bloom.record(new.bits) end
  if new.once ~= '' and queue.has(new, IS_FILTERED) and new.once_place == 0 then
    new.once_place = bloom.record(new.once)
  end
end

local numbered = #given.entered > 0 and queue.next_number(#given.entered) - #given.entered
function queue.next_reserved()
  numbered = numbered + 1
  return numbered
end

local pushed = 0
function queue.new_row(new, page)
  local position = queue.next_reserved()
  pushed = pushed + 1
  return {
    id = struct.pack('>I8', position), state = QUEUED, tries = 0, epoch = state.epoch,
    position = position, flags = new.flags, order = new.order, page = page, waits_for = '',
    reason = '', hops = '', died = '', records = '', first = '', data = new.data,
  }
end

-- Whether a page is open as a hop, and no row has it as its own.
function queue.is_only_a_hop(page)
  local is_open = false
  for _, row in ipairs(queue.rows_with(page)) do
    if row.page == page and row.state ~= DEAD then return false end
    is_open = is_open or (row.state ~= DEAD and not queue.is_late(row))
  end
  return is_open
end

function queue.wait_for_hop(new)
  local row = queue.new_row(new, new.fingerprint)
  row.state, row.waits_for = WAITING, new.fingerprint
  row.records = new.once == '' and '' or queue.packed_texts({'', new.once})
  queue.put_kept(row)
  queue.index(row, row.page)
end

-- Returns the row of the index whose place a start request takes, in a list: one of an earlier
-- start(), because what this one has yielded may be several sessions of one page.
function queue.replaced_start(page)
  for _, row in ipairs(queue.rows_with(page)) do
    local is_session = row.page == page and queue.has(row, IS_START)
        and not queue.has(row, IS_FILTERED)
        and struct.unpack('>I8', row.id) <= (tonumber(state.start_at) or 0)
    if is_session and (row.state ~= QUEUED or call('ZSCORE', pending, row.member)) then
      return {row}
    end
  end
  return {}
end

-- Returns the rows whose place a request takes that is new once in each run, and whether another
-- row has its page.
function queue.replaced_once(page)
  local replaced, has_others = {}, false
  for _, row in ipairs(queue.rows_with(page)) do
    local is_over = row.state == DEAD or queue.is_late(row)
    if row.page == page and is_over and queue.has(row, IS_FILTERED) then
      replaced[#replaced + 1] = row
    elseif row.page == page and row.state ~= DEAD then
      has_others = true
    end
  end
  return replaced, has_others
end

-- Has a request take the row that it replaces; returns whether it is pending.
function queue.take_over(new)
  local row, page = queue.in_flight(new.replaces), new.fingerprint
  if not row then return false end
  local records = queue.missing_records(row, new.records)
  local is_filtered, passes = page ~= '' and queue.has(new, IS_FILTERED), queue.has(new, PASSES)
  local is_own, is_taken = queue.is_in(queue.pages_of(row), page), false
  if is_filtered and not passes then
    if is_own then
      queue.keep(row, FAILED, TO_ITSELF, records)
      return false
    end
    local waits, is_dead = queue.is_open(page, row.id), false
    for _, other in ipairs(queue.rows_with(page)) do
      if other.page == page and other.state == DEAD then
        is_dead, waits = true, waits or other.tries < MOST_TRIES
      end
    end
    if waits then
      queue.wait(row, page, records)
      return false
    end
    if not is_dead and queue.is_known(new) then
      queue.done(row, records)
      return false
    end
  elseif is_filtered then
    is_taken = bloom.look_up(new.bits) > 0 or queue.is_open(page)
  end
  if is_filtered and queue.has(new, IS_RECORDED) and not is_own and not is_taken then
    queue.index(row, page)
    row.hops = row.hops .. queue.prefixed(page)
  end
  queue.read_rest(row)
  if row.first == '' then
    row.first = row.order .. (queue.has(row, NEWEST_FIRST) and '\1' or '\0') .. row.data
  end
  row.order, row.data, row.died = new.order, new.data, ''
  queue.set_flag(row, NEWEST_FIRST, queue.has(new, NEWEST_FIRST))
  queue.set_flag(row, WAS_TAKEN, true)
  row.position = queue.next_reserved()
  queue.put(row, pending)
  return true
end

-- Returns whether a request is pending.
function queue.enter(new)
  local page, replaced, has_others = new.fingerprint, {}, false
  local is_filtered, is_recorded = queue.has(new, IS_FILTERED), queue.has(new, IS_RECORDED)
  local has_page = queue.has(new, IS_START) or (is_filtered and is_recorded)
  local passes = queue.has(new, PASSES)
  if new.replaces ~= '' then return queue.take_over(new) end
  if page ~= '' and is_filtered then
    if queue.is_known(new) then
      if not passes then return false end
      has_page = false
    elseif new.once ~= '' and is_recorded then
      replaced, has_others = queue.replaced_once(page)
    elseif is_recorded and not passes and queue.is_only_a_hop(page) then
      if given.keeps_failed then queue.wait_for_hop(new) end
      queue.record_new(new)
      return false
    end
  elseif page ~= '' and queue.has(new, IS_START) then
    replaced = queue.replaced_start(page)
  end
  if not has_others then
    local row = queue.new_row(new, has_page and page or '')
    for _, other in ipairs(replaced) do
      local is_over = other.state == DEAD or queue.is_late(other)
      local tries = other.tries + (is_over and adds_tries or 0)
      row.tries = math.max(row.tries, math.min(tries, MOST_TRIES - 1))
    end
    queue.put(row, pending)
    if row.page ~= '' and queue.has(row, ONCE) then queue.index(row, row.page) end
  end
  if page ~= '' and is_recorded then queue.record_new(new) end
  queue.drop_all(replaced)
  return not has_others
end

for index, new in ipairs(given.entered) do
  queued[index] = queue.enter(new) and '1' or '0'
  if new.bits ~= '' then places[#places + 1] = bloom.letter(new.place or 0) end
  if new.once ~= '' then places[#places + 1] = bloom.letter(new.once_place or 0) end
end
if pushed > 0 then call('HINCRBY', filter, 'pushed', pushed) end
for _, bits in ipairs(given.recorded) do
  local place = bloom.look_up(bits)
  if place == 0 then added = added + 1 end
  places[#places + 1] = bloom.letter(place < given.lasting and bloom.record(bits) or place)
end
"""

_ENDED = r"""
local finished = 0
for _, ended in ipairs(given.ended) do
  if queue.end_row(ended) then finished = finished + 1 end
end
if finished > 0 then call('HINCRBY', workers, me .. ':done', finished) end
queue.drop_now()

-- Returns the worker of an entry of `downloading`, whether it is a pause, and whether it is over. A
-- pause that would last longer than it was long is over, because the clock was set back.
function queue.parsed_download(entry)
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
function queue.sweep(number)
  if number == 0 then return end
  local first = now % math.max(1, call('ZCARD', downloading) - number + 1)
  for _, entry in ipairs(call('ZRANGE', downloading, first, first + number - 1)) do
    local _, _, is_over = queue.parsed_download(entry)
    if is_over then call('ZREM', downloading, entry) end
  end
end

for _, downloaded in ipairs(given.downloaded) do
  local prefix = downloaded.slot .. '\0' .. string.sub(downloaded.entry, 1, 16)
  if downloaded.pause > 0 then
    local marks = prefix .. '\255'
    call('ZREMRANGEBYLEX', downloading, '[' .. marks, '[' .. marks .. '\255')
    call('ZADD', downloading, 0,
         marks .. struct.pack('>I7I4', now + downloaded.pause, downloaded.pause))
  end
  call('ZREM', downloading, prefix .. string.sub(downloaded.entry, 17, 24))
end
queue.sweep(2 * #given.downloaded)  -- more than enter

-- Returns requests of workers that are not in the hash: they have left or rejoined, or were lost.
function queue.return_orphans(known)
  table.sort(known)
  local from = '-'
  for index = 1, #known + 1 do
    local to = known[index] and '(' .. known[index] or '+'
    while queue.may_move() do
      local entry = call('ZRANGEBYLEX', leased, from, to, 'LIMIT', 0, 1)[1]
      if not entry then break end
      queue.give_back(string.sub(entry, 1, 16), false)
    end
    from = '(' .. (known[index] or '') .. '\255'
  end
  local start = call('HGET', filter, 'start')
  if start and start ~= 'done' and call('HEXISTS', workers, start) == 0 then
    call('HDEL', filter, 'start')
  end
end

function queue.return_expired()
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
        expired[#expired + 1] = queue.give_back(name, true, died)
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
  queue.return_orphans(known)
  queue.sweep(100)
  call('HSET', filter, 'crew', #known)
  return queue.may_move() and now + math.min(1000, lease / 4) or now
end

local lasts_until = tonumber(call('HGET', workers, me))
local look = tonumber(call('HGET', filter, 'look'))
if not lasts_until or lasts_until < now then
  -- All workers may have been unable to renew their leases, for example during an outage of the
  -- server. So the others get the time of a lease to renew theirs.
  call('HSET', filter, 'look', now + lease)
elseif not look or look <= now or look > now + lease then
  call('HSET', filter, 'look', queue.return_expired())
end
"""


_TAKE = r"""
local by_slot, busy, special = given.by_slot, {}, {}
for _, each in ipairs(given.downloads) do busy[each.slot] = each.number end
for _, each in ipairs(given.limits) do special[each.slot] = each end

local taken_ones = queue.taken_by_this()  -- not empty if this batch has failed half-way before
local taken, has_before = #taken_ones / 2, {}
for index = 1, #taken_ones, 2 do has_before[string.sub(taken_ones[index], -8)] = true end
local leases, opened, left, downloads = {}, {}, {}, {}  -- what `lease` writes
function queue.take(from, member)
  local row = queue.row_of(from, member)
  if not row then return false end
  left[#left + 1] = member
  if has_before[row.id] then return false end
  local token = struct.pack('>I6', batch) .. struct.pack('>H', taken)
  local entry = me .. token .. row.id
  taken = taken + 1
  taken_ones[#taken_ones + 1], taken_ones[#taken_ones + 2] = entry, row.packed
  leases[#leases + 1], leases[#leases + 2] = 0, entry
  if row.page ~= '' and not queue.has(row, WAS_TAKEN) then
    opened[#opened + 1], opened[#opened + 2] = 0, queue.page_member(row.page, row)
  end
  if from == suspects then
    suspect = token
  elseif by_slot then
    local slot = string.sub(row.order, 1, -11)
    local limit = special[slot] or given
    if limit.limit > 0 or limit.has_delay then
      downloads[#downloads + 1], downloads[#downloads + 2] = 0, slot .. '\0' .. me .. token
    end
  end
  return true
end

-- Moves the requests that were taken from a set. They are leased first: if the script fails
-- half-way, what is written for a request that is not leased would stay.
function queue.lease(from)
  if #left == 0 then return end
  if #leases > 0 then call('ZADD', leased, unpack(leases)) end
  if from == suspects then call('HSET', workers, me .. ':suspect', suspect) end
  if #downloads > 0 then call('ZADD', downloading, unpack(downloads)) end
  if #opened > 0 then call('ZADD', open, unpack(opened)) end
  call('ZREM', from, unpack(left))
  leases, opened, left, downloads = {}, {}, {}, {}
end

-- How many requests this worker may take, by slot; filled by `room_of`.
local rooms, crew = {}, tonumber(call('HGET', filter, 'crew')) or 1

-- Requests of a slot with a delay are taken by one worker at a time, which keeps to the delay. Of
-- the limit of another slot, each worker may use its share.
function queue.room_of(slot)
  if rooms[slot] then return rooms[slot] end
  local limit = special[slot] or given
  local most, has_delay = limit.limit, limit.has_delay
  local room, ours, others = want, 0, 0
  if most > 0 or has_delay then
    if most == 0 then most = want end
    local from, to = '[' .. slot .. '\0', '(' .. slot .. '\1'
    for _, entry in ipairs(call('ZRANGEBYLEX', downloading, from, to)) do
      local worker, is_pause, is_over = queue.parsed_download(entry)
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
function queue.slot_after(slot)
  local member = call('ZRANGEBYLEX', pending, '(' .. slot .. '\1', '+', 'LIMIT', 0, 1)[1]
      or call('ZRANGE', pending, 0, 0)[1]
  if not member then return nil end
  slots_to_read, bytes_to_read = slots_to_read - 1, bytes_to_read - #member
  return string.sub(member, 1, string.find(member, '\0', 1, true) - 1), member
end

-- Returns, beginning after the slot from which a request was taken last: the slots from which this
-- worker may take requests, no more than it wants; the first request of each; the places of these
-- slots by their number of downloads; the highest such number; the slot that was looked at last.
function queue.slots_in_turn()
  local slots, firsts, levels, highest, idle = {}, {}, {}, 0, want - taken
  local slot, member = queue.slot_after(call('HGET', filter, 'last') or '')
  local first, looked_at = slot, slot
  while slot do
    if queue.room_of(slot) > 0 then
      slots[#slots + 1], firsts[#slots + 1] = slot, member
      local level = busy[slot] or 0
      levels[level] = levels[level] or {}
      table.insert(levels[level], #slots)
      highest = math.max(highest, level)
      if level == 0 then idle = idle - 1 end
    end
    looked_at = slot
    if idle <= 0 or slots_to_read <= 0 or bytes_to_read <= 0 then break end
    slot, member = queue.slot_after(slot)
    if slot == first then break end
  end
  return slots, firsts, levels, highest, looked_at
end

-- Takes requests from the slots with the fewest downloads first, round-robin.
function queue.take_by_slot()
  local slots, firsts, levels, highest, looked_at = queue.slots_in_turn()
  local level, last, taken_of = 0, 0, {}
  while level <= highest do
    local places = levels[level] or {}
    table.sort(places, function(a, b)
      if (a > last) ~= (b > last) then return a > last end
      return a < b
    end)
    for _, place in ipairs(places) do
      if taken >= want or not queue.may_move() then break end
      local slot = slots[place]
      -- Not by `first_of`, whose range ends before a priority that begins with a byte of 255.
      local from, to = '[' .. slot .. '\0', '(' .. slot .. '\1'
      local before = taken_of[slot] or 0
      local member = firsts[place]
          or call('ZRANGEBYLEX', pending, from, to, 'LIMIT', before, 1)[1]
      firsts[place] = nil
      if member and queue.take(pending, member) then
        last = place
        rooms[slot], taken_of[slot] = rooms[slot] - 1, before + 1
        if rooms[slot] > 0 then
          highest = math.max(highest, level + 1)
          levels[level + 1] = levels[level + 1] or {}
          table.insert(levels[level + 1], place)
        end
      end
    end
    if taken >= want or not queue.may_move() then break end
    level = level + 1
  end
  if looked_at then call('HSET', filter, 'last', slots[last] or looked_at) end
end

-- Makes what has failed or waits since an earlier epoch pending, or dead; spares so many moves.
function queue.retry_late(spared)
  local ends = struct.pack('>I4', state.epoch)
  while queue.may_move(spared) do
    local member = call('ZRANGEBYLEX', kept, '-', '(\0' .. ends, 'LIMIT', 0, 1)[1]
    if not member and is_started then  -- before, start() may yield start requests again
      member = call('ZRANGEBYLEX', kept, '[\1', '(\1' .. ends, 'LIMIT', 0, 1)[1]
    end
    if not member then break end
    local row = queue.row_of(kept, member)
    if row and (row.state == FAILED or row.state == WAITING) then
      queue.try_again(row, row.tries + adds_tries)
      if row.state == DEAD then given_up = given_up + 1 end
    elseif row then
      call('ZREM', kept, member)
    end
  end
end

function queue.take_suspect()
  local member = call('ZRANGE', suspects, 0, 0)[1]
  local row = member and queue.row_of(suspects, member)
  -- Workers that seemed to have died may have rejoined, so that their deaths do not count.
  if row and queue.deaths_of(row) >= MOST_DEATHS then
    queue.take(suspects, member)
    queue.lease(suspects)
  elseif row then
    queue.put(row, pending)
  end
end

queue.end_waiting(want)
queue.drop_now()
if call('ZCARD', pending) == 0 then queue.retry_late(want) end
if want > taken and (given.stands_still or not suspect) then
  if by_slot then
    queue.take_by_slot()
  else
    for _, member in ipairs(call('ZRANGE', pending, 0, want - taken - 1)) do
      if not queue.may_move() then break end
      queue.take(pending, member)
    end
  end
  queue.lease(pending)
  if call('ZCARD', pending) == 0 and taken == 0 and queue.count_late(kept, state.epoch) == 0
      and (given.stands_still or not queue.first_of(leased, me)) then
    queue.take_suspect()
  end
end
queue.end_waiting()
queue.drop_now()
queue.retry_late()

local start = call('HGET', filter, 'start')
if given.start_ended and start == me then
  start = 'done'
  call('HSET', filter, 'start', start)
elseif given.may_start and not start then
  call('HSET', filter, 'start', me)
  queue.note_start()
end
if queue.count_left() > 0 or start ~= 'done' then
  call('HDEL', filter, 'ended')
elseif given.is_over then
  call('HSETNX', filter, 'ended', now)
end
if is_lost then return {'lost'} end
return queue.reply(table.concat(queued) .. ' ' .. added, taken_ones)
"""

RECORD = (  # without a queue
    BASE + "local filter = KEYS[1]\n" + lua_arguments(RECORD_FIELDS) + _BITS + _RECORD
)
BATCH = (
    COMMON
    + lua_arguments(BATCH_FIELDS)
    + lua_reply(BATCH_REPLY)
    + _BITS
    + _BATCH
    + _ROWS
    + _ENTERED
    + _ENDED
    + _TAKE
)
