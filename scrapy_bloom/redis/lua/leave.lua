-- Uses: queue
-- Remove a worker. To be repeated until no request of the worker is left to return.
--
-- KEYS: those of `redis.layout.KEYS`. ARGV: a map of the `id` of the filter, and `worker`.
--
-- Returns a map. Its status is 'other' if the filter has another id, else 'ok' with `is_through`:
-- whether no request of the worker is left to return.
local call, keys, given = redis.call, queue.keys, cmsgpack.unpack(ARGV[1])
if call('HGET', keys.filter, 'id') ~= given.id then return cmsgpack.pack({status = 'other'}) end
local _, is_through = queue.give_back(given.worker, false)
if is_through then call('HDEL', keys.workers, given.worker .. ':number') end
return cmsgpack.pack({status = 'ok', is_through = is_through})
