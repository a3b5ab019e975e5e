-- Uses: queue
-- Add a worker, and begin a run if that is new. The script is idempotent.
--
-- KEYS: those of `redis.layout.KEYS`. ARGV: the `id` of the filter, and
--   worker        the id of the worker; `former`: the one before, if it joins again, else ''
--   name          host:pid
--   lease         the duration of the lease in ms
--   run           the id of the run, if this worker begins it
--   began         when that run began, in ms, if the worker joins again, else 0
--   spider, run_name, is_crawl: as `queues.store.Joining` has them
--
-- Returns the status 'spider' if the queue belongs to another one, whose name is `spider`; else
--   run, run_name, began  of the current run; the last in ms
--   is_late, others, retried: as `queues.store.Opened` has them
--   runs, pending how many runs there are, and requests pending
--   ended         when the queue became empty, in ms; 0: it is not
--   last          the number of the last batch of the former id; -1: it is unknown
local keys, now = queue.keys, queue.now
local TRIES_MS = 3600000  -- without names of runs, this is the time between two tries that count
local me, former, last = given.worker, given.former, ''
local state = queue.read_state('crawl', 'run', 'run_name', 'began', 'epoch', 'tried_at', 'pushed',
                               'done', 'ended')
if state.crawl and state.crawl ~= given.spider then
  return reply({status = 'spider', spider = state.crawl})
end
call('HSETNX', keys.filter, 'crawl', given.spider)

local function others_alive()
  local alive, all = 0, call('HGETALL', keys.workers)
  for index = 1, #all, 2 do
    if #all[index] == 16 and all[index] ~= me and tonumber(all[index + 1]) >= now then
      alive = alive + 1
    end
  end
  return alive
end

local function begin_epoch(began)
  local since, adds = now - (tonumber(state.tried_at) or -TRIES_MS), 1
  if given.run_name == '' and since >= 0 and since < TRIES_MS then
    adds = 0
  elseif given.run_name == '' then
    call('HSET', keys.filter, 'tried_at', now)
  end
  state.epoch = state.epoch + 1
  call('HSET', keys.filter, 'epoch', state.epoch, 'adds_tries', adds, 'began', began)
end

local next_began = math.max(now, (tonumber(state.began) or 0) + 1)
local is_late, begins = false, given.is_crawl and not state.run
if given.is_crawl and state.run and state.run ~= given.run and state.run_name ~= given.run_name then
  if given.began > 0 then  -- another worker, or an older state of the server, has another run
    is_late = tonumber(state.began) >= given.began
  elseif given.run_name ~= '' then
    is_late = call('HEXISTS', keys.runs, given.run_name) == 1
  end
  begins = not is_late and given.run_name ~= ''
end
if begins then
  local began, failed = next_began, call('ZCARD', keys.kept) - call('ZCARD', keys.waiting)
  if given.began > 0 then began = given.began end
  call('HSET', keys.runs, given.run_name, table.concat({
    began, state.pushed or 0, state.done or 0, failed, call('ZCARD', keys.dead), state.ended or 0,
  }, ' '))
  begin_epoch(began)
  call('HDEL', keys.filter, 'start', 'ended')
  call('HSET', keys.filter, 'run', given.run, 'run_name', given.run_name)
elseif given.is_crawl and former == '' and given.run_name == '' and others_alive() == 0
    and call('HEXISTS', keys.workers, me) == 0  -- else, the reply was lost
    and queue.count_unfinished(state.epoch) + call('ZCARD', keys.unreadable) == 0 then
  begin_epoch(next_began)
  if call('ZCARD', keys.kept) > 0 then call('HDEL', keys.filter, 'ended') end
end

if former ~= '' then
  last = call('HGET', keys.workers, former .. ':number') or ''
  if not tonumber(last) then call('HSET', keys.workers, former .. ':back', 1) end
  local id = call('HGET', keys.workers, former .. ':dead')
  local row = id and call('ZSCORE', keys.dead, id) and queue.row_of(keys.dead, id)
  if row then
    row.state = queue.QUEUED
    queue.put(row, keys.suspects)
  end
  call('HDEL', keys.workers, former .. ':dead')
  if call('HEXISTS', keys.workers, former .. ':stop') == 1 then
    call('HSET', keys.workers, me .. ':stop', 1)
  end
  queue.give_back(former, false)
end
local look = tonumber(call('HGET', keys.filter, 'look'))
if look and look < now - given.lease then  -- no worker could renew its lease, as in an outage
  call('HSET', keys.filter, 'look', now + given.lease)
end
call('HSET', keys.workers, me, now + given.lease, me .. ':name', given.name,
     me .. ':lease', given.lease)
call('HSETNX', keys.workers, me .. ':number', 0)
local start = call('HGET', keys.filter, 'start')
if former == '' and (not start or start == 'done') then queue.note_start() end

local late = queue.count_late(state.epoch)
state = queue.read_state('run', 'run_name', 'began', 'ended')
return reply({
  run = state.run or '', run_name = state.run_name or '',
  began = tonumber(state.began) or 0,
  is_late = is_late, runs = call('HLEN', keys.runs), others = others_alive(),
  pending = call('ZCARD', keys.pending), retried = late, ended = tonumber(state.ended) or 0,
  last = tonumber(last) or tonumber(string.match(last, '^gone (%d+)')) or -1,
})
