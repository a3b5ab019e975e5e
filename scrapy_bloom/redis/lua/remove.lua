-- Remove a filter and its queue in one step; the caller removes the blocks.
--
-- KEYS: those of `redis.layout.KEYS`. ARGV: the id of the filter.
--
-- Returns 'ok', or 'other' if the filter has another id.
local call = redis.call
if call('HGET', KEYS[1], 'id') ~= ARGV[1] then return 'other' end
call('UNLINK', unpack(KEYS))
return 'ok'
