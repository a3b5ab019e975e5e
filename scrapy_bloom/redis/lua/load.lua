-- Uses: queue
-- Add rows of another queue.
--
-- KEYS: those of `redis.layout.KEYS`. ARGV: a map:
--   id            the id of the filter
--   rows          rows, each a list of its id as a number, the name of the set that gets it, and
--                 the row as it is stored
--
-- Returns a map with a status: 'ok', or 'other' if the filter has another id.
local call, keys = redis.call, queue.keys
local QUEUED, WAITING = unpack(queue.STATES)
local ONCE, WAS_TAKEN = 'o', 't'
local given = cmsgpack.unpack(ARGV[1])
if call('HGET', keys.filter, 'id') ~= given.id then
  return cmsgpack.pack({status = 'other'})
end
for _, loaded in ipairs(given.rows) do
  local row = queue.parsed_row(struct.pack('>I8', loaded[1]), loaded[3])
  local has_page = queue.has(row, ONCE) or queue.has(row, WAS_TAKEN) or row.state ~= QUEUED
  for _, page in ipairs(has_page and queue.pages_of(row) or row.hops) do queue.index(row, page) end
  if row.state == WAITING then
    call('ZADD', keys.waiting, 0, queue.waiting_for(row.waits_for, row.epoch) .. row.id)
  end
  queue.put(row, keys[loaded[2]])
end
return cmsgpack.pack({status = 'ok'})
