-- Create a filter, or change fields of its hash, unless another crawl has changed it.
--
-- KEYS: those of `redis.layout.KEYS`, then bitmaps of generations. ARGV: a map:
--   id            the id of the filter; '': there must be none
--   version       its version; '': there is no filter
--   next_version  its new version
--   num_queue     how many of the KEYS are those of the filter and its queue
--   fields        names and values of fields that are set
--   removed       names of fields that are removed
--   num_keys      how many keys each generation has that is added, in the order of their bitmaps
--   sizes         of a complete copy: for each of the KEYS after the first, the command that counts
--                 what it has, and how many it must have
--
-- Returns 'ok', 'other' (the filter has another id), 'version', 'lost' (a size is another one), or
-- 'foreign' (there is no filter, and a key of the queue has a value of another program).
local call = redis.call
local filter, given = KEYS[1], cmsgpack.unpack(ARGV[1])
local state = call('HMGET', filter, 'id', 'version')
if state[2] == given.next_version then return 'ok' end  -- the reply was lost
if (state[1] or '') ~= given.id then return 'other' end
if given.id == '' and call('EXISTS', filter) == 1 then return 'other' end  -- not a filter
if (state[2] or '') ~= given.version then return 'version' end
-- Without TYPE, which would be one more right that a user needs.
for index = 2, given.id == '' and given.num_queue or 1 do
  local set, hash = redis.pcall('ZCARD', KEYS[index]), redis.pcall('HLEN', KEYS[index])
  if type(set) == 'table' and type(hash) == 'table' then return 'foreign' end  -- two errors
end
for index, size in ipairs(given.sizes) do
  if call(size[1], KEYS[index + 1]) ~= size[2] then return 'lost' end
end
for index, num_keys in ipairs(given.num_keys) do
  call('SETBIT', KEYS[given.num_queue + index], num_keys, 1)
end
if given.id == '' then call('UNLINK', unpack(KEYS, 2, given.num_queue)) end  -- of a lost filter
call('HSET', filter, 'version', given.next_version, unpack(given.fields))
if #given.removed > 0 then call('HDEL', filter, unpack(given.removed)) end
return 'ok'
