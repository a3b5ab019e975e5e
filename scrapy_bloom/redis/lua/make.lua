-- Uses: bloom
-- Make keys of the newest generation in which a batch may set bits, before the batch: each takes
-- 50 us, and a batch may need 48 or more.
--
-- KEYS: the filter's hash. ARGV: a map:
--   id            the id of the filter
--   version       the version of the generations; of another one, nothing is made
--   generations   the newest generation, as `bloom` gets it
--   chunks        the numbers of the keys
local given = cmsgpack.unpack(ARGV[1])
local state = redis.call('HMGET', KEYS[1], 'id', 'version')
if state[1] ~= given.id or state[2] ~= given.version then return end
bloom = bloom(given.generations)
for _, chunk in ipairs(given.chunks) do
  bloom.make(bloom.key_of(given.generations[1], chunk))
end
