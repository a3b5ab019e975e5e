-- Uses: queue
-- Remove a worker. To be repeated until no request of the worker is left to return.
--
-- KEYS: those of `redis.layout.KEYS`. ARGV: the `id` of the filter, and `worker`.
--
-- Returns `is_through`: whether no request of the worker is left to return.
local _, is_through = queue.give_back(given.worker, false)
if is_through then call('HDEL', queue.keys.workers, given.worker .. ':number') end
return reply({is_through = is_through})
