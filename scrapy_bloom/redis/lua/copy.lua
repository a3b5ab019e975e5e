-- Write a part of a copy of a filter.
--
-- KEYS: the filter's hash, and the key to be written. ARGV: the id of the filter; a command, and
-- its arguments without the key.
--
-- Returns 'ok', or 'other' if the copy was removed.
if redis.call('HGET', KEYS[1], 'id') ~= ARGV[1] then return 'other' end
redis.call(ARGV[2], KEYS[2], unpack(ARGV, 3))
return 'ok'
