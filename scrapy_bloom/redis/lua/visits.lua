-- How rows enter, end, fail and wait in a batch, by the rules of `queues.store`.
--
-- What they share with the script is in `batch`: `state` (fields of the filter's hash), `numbered`
-- (the last number of a row), `adds_tries` (1 or 0), `is_started` (whether start() has ended),
-- `has_kept` (whether failed, waiting or dead rows exist), `has_work` (whether the worklist has
-- pages), and `suspect` (the token of the worker's suspect). They count what is `added` to the
-- filter, `pushed` to the queue and `given_up`, and collect the `circles`.
local keys = queue.keys
local TO_ITSELF = 'it was redirected to itself'
local TO_OTHERS = 'it led to redirects to pages that are not done'

local batch = {added = 0, pushed = 0, given_up = 0, circles = {}}
local visits = {batch = batch}

function visits.is_in(list, text)
  for _, other in ipairs(list) do
    if other == text then return true end
  end
  return false
end

-- Returns the rows of the index that have a page, in the order in which they entered.
function visits.rows_with(page)
  local rows, prefix = {}, queue.prefixed(page)
  local members = call('ZRANGEBYLEX', keys.open, '[' .. prefix, '(' .. prefix .. '\255')
  for _, member in ipairs(members) do
    local id = string.sub(member, -8)
    local packed = call('HGET', keys.rows, id)
    local row = packed and queue.parsed_row(id, packed)
    if row and visits.is_in(queue.pages_of(row), page) then
      rows[#rows + 1] = row
      row.key = row.state == queue.DEAD and keys.dead or row.state == queue.QUEUED and keys.pending
          or keys.kept
      row.member = queue.member_of(row.key, row)  -- pending may stand for others, like leased
    else
      call('ZREM', keys.open, member)
    end
  end
  return rows
end

-- Whether a row is about to become pending.
function visits.is_late(row)
  return row.key == keys.kept and row.epoch < batch.state.epoch
end

-- Returns `is_open`: whether a row, other than one, may still crawl a page, so that nobody knows
-- its end; and whether any row has it as its own (`has_row`), or a dead one (`is_dead`), or one
-- that is dead by deaths (`has_died`).
function visits.state_of(page, but)
  local state = {}
  for _, row in ipairs(visits.rows_with(page)) do
    local is_own = row.page == page
    if row.state == queue.DEAD then
      state.is_dead = state.is_dead or is_own
      state.has_died = state.has_died or (is_own and row.tries < queue.MOST_TRIES)
    else
      local has_page = is_own or not visits.is_late(row)  -- which loses its hops
      state.is_open = state.is_open or (has_page and row.id ~= but)
      state.has_row = state.has_row or is_own
    end
  end
  return state
end

-- Returns the failed and dead rows with a page as their own, which another row may replace.
-- Those that are not filtered are sessions of their own.
function visits.failed_rows(page)
  local rows = {}
  for _, row in ipairs(visits.rows_with(page)) do
    local has_failed = row.state == queue.FAILED or row.state == queue.DEAD
    if row.page == page and has_failed and queue.has(row, queue.IS_FILTERED) then
      rows[#rows + 1] = row
    end
  end
  return rows
end

-- Whether a request is in flight, as this worker has taken it.
function visits.has_taken(entry)
  if string.sub(entry, 1, 16) ~= given.worker or not call('ZSCORE', keys.leased, entry) then
    return false
  end
  if batch.suspect == string.sub(entry, 17, 24) then
    batch.suspect = nil
    call('HDEL', keys.workers, given.worker .. ':suspect')
  end
  return true
end

-- Returns the row of such a request.
function visits.in_flight(entry)
  local row = visits.has_taken(entry) and queue.row_of(keys.leased, entry, 0)  -- a batch has few
  if row then row.state, row.waits_for = queue.QUEUED, '' end  -- if a script has failed half-way
  return row
end

-- Rows that end. Their `records` are bits: of a page, of that page in this run, of another page ...

-- Sets what is not recorded yet: nothing of a row without hops that has entered in this run.
function visits.set_records(row, records)
  local is_complete = #row.hops == 0 and row.epoch == batch.state.epoch
      and queue.has(row, queue.IS_RECORDED)
  row.records = is_complete and {} or records
end

function visits.finish(row, pages)
  local newest = #given.generations
  for index, bits in ipairs(row.records) do
    local place = bits == '' and newest or bloom.look_up(bits)
    if place == 0 and index % 2 == 1 then batch.added = batch.added + 1 end
    if place < newest then bloom.record(bits) end
  end
  pages = batch.has_kept and (pages or queue.pages_of(row)) or {}
  for _, page in ipairs(pages) do
    if queue.first_with(keys.waiting, queue.waiting_for(page, batch.state.epoch)) then
      call('ZADD', keys.worklist, 0, page)
      batch.has_work = true
    end
  end
  queue.drop(row)
  for _, page in ipairs(queue.has(row, queue.IS_FILTERED) and pages or {}) do
    for _, other in ipairs(visits.failed_rows(page)) do queue.drop(other) end
  end
end

-- Ends rows that wait for pages that are done; spares so many moves.
function visits.end_waiting(spared)
  while batch.has_work and queue.may_move(spared) do
    local page = call('ZRANGE', keys.worklist, 0, 0)[1]
    batch.has_work = page ~= nil
    if not page then break end
    local prefix = queue.waiting_for(page, batch.state.epoch)
    local member = queue.first_with(keys.waiting, prefix)
    local row = member and queue.row_of(keys.waiting, member)
    if row and row.state == queue.WAITING and row.waits_for == page then
      row.key, row.member = keys.kept, queue.member_of(keys.kept, row)
      visits.finish(row)
    elseif row then
      call('ZREM', keys.waiting, member)
    elseif not member then
      call('ZREM', keys.worklist, page)
    end
  end
end

function visits.done(row, pages)
  visits.finish(row, pages)
  visits.end_waiting(given.want)
end

function visits.put_kept(row)
  batch.has_kept, row.epoch = true, batch.state.epoch
  queue.set_flag(row, queue.WAS_TAKEN, true)
  queue.put(row, keys.kept)
end

-- Keeps a row as failed or waiting, or ends it, as the settings say.
function visits.keep(row, new_state, reason)
  if not given.keeps_failed then return visits.done(row) end
  local has_failed, replaced = new_state == queue.FAILED, {}
  if has_failed and queue.has(row, queue.IS_FILTERED) and row.page ~= '' then
    replaced = visits.failed_rows(row.page)
  end
  for _, other in ipairs(replaced) do
    if other.state == queue.FAILED then row.tries = math.max(row.tries, other.tries) end
  end
  row.state, row.reason, row.records = new_state, reason, has_failed and {} or row.records
  visits.put_kept(row)
  for _, other in ipairs(replaced) do
    if other.id ~= row.id then queue.drop(other) end
  end
end

function visits.wait(row, page)
  row.waits_for = page
  visits.keep(row, queue.WAITING, '')
  if row.state ~= queue.WAITING then return end
  for _, other in ipairs(visits.rows_with(page)) do
    if visits.is_in(queue.pages_of(row), other.waits_for) and not visits.is_late(other) then
      batch.circles[#batch.circles + 1] = row.data
      return
    end
  end
end

-- Returns whether a request has left the queue.
function visits.end_row(ended)
  local entry, how, opened = ended.entry, ended.how, {}
  local is_simple = not batch.has_kept or #ended.pages == 0
  if how == 'done' and #ended.awaits == 0 and #ended.records == 0 and is_simple then
    local is_there = visits.has_taken(entry)  -- nearly all requests: the row need not be read
    if is_there then
      visits.done({id = string.sub(entry, -8), key = keys.leased, member = entry, records = {},
                   pages = ended.pages, flags = ''})
    end
    return is_there
  end
  local row = visits.in_flight(entry)
  if not row then return false end
  if how == 'returned' then
    queue.put_back(row)
    return false
  elseif how == 'unreadable' then
    queue.set_flag(row, queue.WAS_TAKEN, true)
    queue.put(row, keys.unreadable)
    return false
  end
  visits.set_records(row, ended.records)
  for _, page in ipairs(how == 'done' and ended.awaits or {}) do
    local is_own = visits.is_in(queue.pages_of(row), page)
    if not is_own and visits.state_of(page, row.id).is_open then opened[#opened + 1] = page end
  end
  if how == 'failed' then
    visits.keep(row, queue.FAILED, ended.reason)
  elseif #opened > 1 then
    visits.keep(row, queue.FAILED, TO_OTHERS)
  elseif #opened == 1 then
    visits.wait(row, opened[1])
  else
    visits.done(row, ended.pages)
  end
  return true
end

-- Rows that enter.

-- Whether a request is recorded.
function visits.is_known(new)
  if new.once ~= '' then
    new.once_place = bloom.look_up(new.once)
    return new.once_place > 0
  end
  new.place = bloom.look_up(new.bits)
  return new.place > 0
end

-- Records a fingerprint if it is new, and returns its place.
function visits.record(bits, known_place)
  local place = known_place or bloom.look_up(bits)
  if place > 0 then return place end
  batch.added = batch.added + 1
  return bloom.record(bits)
end

-- Records a request, not before it is in the queue.
function visits.record_new(new)
  new.place = visits.record(new.bits, new.place)
  if new.once ~= '' and queue.has(new, queue.IS_FILTERED) and new.once_place == 0 then
    new.once_place = bloom.record(new.once)
  end
end

function visits.new_row(new, page)
  batch.pushed, batch.numbered = batch.pushed + 1, batch.numbered + 1
  return {
    id = struct.pack('>I8', batch.numbered), state = queue.QUEUED, tries = 0,
    epoch = batch.state.epoch, position = batch.numbered, flags = new.flags, order = new.order,
    page = page, waits_for = '', reason = '', hops = {}, died = '', records = {}, first = '',
    data = new.data,
  }
end

-- Whether a page is open as a hop, and no row has it as its own.
function visits.is_only_a_hop(page)
  local state = visits.state_of(page)
  return state.is_open and not state.has_row
end

-- Returns whether a row of the index gives its place to a request of its page that enters: one
-- that is new once in each run, or a start request. Of start requests, only those of an earlier
-- start() do, because what this one has yielded may be several sessions of one page.
function visits.gives_way(row, new)
  if queue.has(new, queue.IS_FILTERED) then
    return queue.has(row, queue.IS_FILTERED) and (row.state == queue.DEAD or visits.is_late(row))
  end
  return queue.has(row, queue.IS_START) and not queue.has(row, queue.IS_FILTERED)
      and struct.unpack('>I8', row.id) <= (tonumber(batch.state.start_at) or 0)
      and (row.state ~= queue.QUEUED or call('ZSCORE', keys.pending, row.member))
end

-- Returns the rows whose place a request takes (a start request takes one), and whether another
-- row has its page.
function visits.replaced_by(new)
  local replaced, has_others = {}, false
  for _, row in ipairs(visits.rows_with(new.fingerprint)) do
    if row.page == new.fingerprint and visits.gives_way(row, new) then
      replaced[#replaced + 1] = row
      if not queue.has(new, queue.IS_FILTERED) then break end
    elseif row.page == new.fingerprint and row.state ~= queue.DEAD then
      has_others = queue.has(new, queue.IS_FILTERED)
    end
  end
  return replaced, has_others
end

-- Has a request take the row that it replaces; returns whether it is pending.
function visits.take_over(new)
  local row, page = visits.in_flight(new.replaces), new.fingerprint
  if not row then return false end
  if row.records[1] == new.replaces then  -- done by a script that has failed half-way
    queue.put(row, keys.pending)
    return true
  end
  visits.set_records(row, new.records)
  local is_filtered = page ~= '' and queue.has(new, queue.IS_FILTERED)
  local is_own, is_taken = visits.is_in(queue.pages_of(row), page), false
  if is_filtered and not queue.has(new, queue.PASSES) then
    if is_own then
      visits.keep(row, queue.FAILED, TO_ITSELF)
      return false
    end
    local state = visits.state_of(page, row.id)
    if state.is_open or state.has_died then
      visits.wait(row, page)
      return false
    end
    if not state.is_dead and visits.is_known(new) then
      visits.done(row)
      return false
    end
  elseif is_filtered then
    is_taken = bloom.look_up(new.bits) > 0 or visits.state_of(page).is_open
  end
  if is_filtered and queue.has(new, queue.IS_RECORDED) and not is_own and not is_taken then
    queue.index(row, page)
    row.hops[#row.hops + 1] = page
  end
  if row.first == '' then
    row.first = row.order .. (queue.has(row, queue.NEWEST_FIRST) and '\1' or '\0') .. row.data
  end
  row.order, row.data, row.died, row.records = new.order, new.data, '', {new.replaces}
  queue.set_flag(row, queue.NEWEST_FIRST, queue.has(new, queue.NEWEST_FIRST))
  queue.set_flag(row, queue.WAS_TAKEN, true)
  batch.numbered = batch.numbered + 1
  row.position = batch.numbered
  queue.put(row, keys.pending)
  return true
end

-- Returns whether a request is pending.
function visits.enter(new)
  if new.replaces ~= '' then return visits.take_over(new) end
  local page, replaced, has_others = new.fingerprint, {}, false
  local is_filtered, is_start = queue.has(new, queue.IS_FILTERED), queue.has(new, queue.IS_START)
  local is_recorded, passes = queue.has(new, queue.IS_RECORDED), queue.has(new, queue.PASSES)
  local has_page = is_start or (is_filtered and is_recorded)
  if page ~= '' and is_filtered then
    if visits.is_known(new) then
      if not passes then return false end
      has_page = false
    elseif new.once ~= '' and is_recorded then
      replaced, has_others = visits.replaced_by(new)
    elseif is_recorded and not passes and visits.is_only_a_hop(page) then
      if given.keeps_failed then
        local row = visits.new_row(new, page)
        row.state, row.waits_for = queue.WAITING, page
        row.records = new.once == '' and {} or {'', new.once}
        visits.put_kept(row)
        queue.index(row, page)
      end
      visits.record_new(new)
      return false
    end
  elseif page ~= '' and is_start then
    replaced = visits.replaced_by(new)
  end
  if not has_others then
    local row = visits.new_row(new, has_page and page or '')
    for _, other in ipairs(replaced) do
      local is_over = other.state == queue.DEAD or visits.is_late(other)
      local tries = other.tries + (is_over and batch.adds_tries or 0)
      row.tries = math.max(row.tries, math.min(tries, queue.MOST_TRIES - 1))
    end
    queue.put(row, keys.pending)
    if row.page ~= '' and queue.has(row, queue.ONCE) then queue.index(row, row.page) end
  end
  if page ~= '' and is_recorded then visits.record_new(new) end
  for _, other in ipairs(replaced) do queue.drop(other) end
  return not has_others
end

-- Makes what has failed or waits since an earlier epoch pending, or dead; spares so many moves.
function visits.retry_late(spared)
  local ends = struct.pack('>I4', batch.state.epoch)
  while queue.may_move(spared) do
    local member = queue.first_in(keys.kept, '-', '(\0' .. ends)
    if not member and batch.is_started then  -- before, start() may yield start requests again
      member = queue.first_in(keys.kept, '[\1', '(\1' .. ends)
    end
    if not member then break end
    local row = queue.row_of(keys.kept, member)
    if row and (row.state == queue.FAILED or row.state == queue.WAITING) then
      queue.try_again(row, row.tries + batch.adds_tries)
      if row.state == queue.DEAD then batch.given_up = batch.given_up + 1 end
    elseif row then
      call('ZREM', keys.kept, member)
    end
  end
end

return visits
