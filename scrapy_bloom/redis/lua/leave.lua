-- Uses: queue
-- Remove a worker. To be repeated until no request of the worker is left to return.
--
-- KEYS: those of `redis.layout.KEYS`. ARGV: a map of the `id` of the filter, and `worker`.
--
-- Returns a map. Its status is 'other' if the filter has another id, else 'ok' with
--   is_through    whether no request of the worker is left to return
--   others        how many other workers there are
--   ended         when the queue became empty, in ms; 0: it is not
local call, keys = redis.call, queue.keys
local given = cmsgpack.unpack(ARGV[1])
local me = given.worker
if call('HGET', keys.filter, 'id') ~= given.id then
  return cmsgpack.pack({status = 'other'})
end
local _, is_through = queue.give_back(me, false)
if is_through then call('HDEL', keys.workers, me .. ':number') end
return cmsgpack.pack({status = 'ok', is_through = is_through, others = queue.alive_but(me),
                      ended = tonumber(call('HGET', keys.filter, 'ended')) or 0})
