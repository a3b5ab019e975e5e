-- Create a filter, or change fields of its hash, unless another crawl has changed it.
--
-- KEYS: those of `redis.layout.KEYS`, then bitmaps of generations. ARGV:
--   known         the id of the filter and its version; two '' if there must be none
--   next_version  its new version
--   fields        names and values of fields that are set
--   removed       names of fields that are removed
--   num_keys      how many keys each generation has that is added, in the order of their bitmaps
--
-- Returns the status 'ok', 'other' (the filter has another id), 'version' (it has another version),
-- or 'foreign' (there is no filter, and a key of the queue has a value of another program).
local filter, state = KEYS[1], call('HMGET', KEYS[1], 'id', 'version')
local is_new, num_queue = given.known[1] == '', #KEYS - #given.num_keys
if state[2] == given.next_version then return reply({}) end  -- the reply was lost
if (state[1] or '') ~= given.known[1] or (is_new and call('EXISTS', filter) == 1) then
  return reply({status = 'other'})
end
if (state[2] or '') ~= given.known[2] then return reply({status = 'version'}) end
-- Without TYPE, which would be one more right that a user needs.
for index = 2, is_new and num_queue or 1 do
  local set, hash = redis.pcall('ZCARD', KEYS[index]), redis.pcall('HLEN', KEYS[index])
  if type(set) == 'table' and type(hash) == 'table' then  -- two errors
    return reply({status = 'foreign'})
  end
end
for index, num_keys in ipairs(given.num_keys) do
  call('SETBIT', KEYS[num_queue + index], num_keys, 1)
end
if is_new then call('UNLINK', unpack(KEYS, 2, num_queue)) end  -- of a lost filter
call('HSET', filter, 'version', given.next_version, unpack(given.fields))
if #given.removed > 0 then call('HDEL', filter, unpack(given.removed)) end
return reply({})
