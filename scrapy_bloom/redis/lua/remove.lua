-- Remove a filter and its queue, without blocks.
--
-- KEYS: those of `redis.layout.KEYS`. ARGV: the `id` of the filter.
call('UNLINK', unpack(KEYS))
return reply({})
