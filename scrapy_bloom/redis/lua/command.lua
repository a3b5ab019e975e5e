-- Execute a command if the filter has an id.
--
-- KEYS: the filter's hash; the keys of the command. ARGV: the id; the command; its arguments after
-- the keys. Returns 'ok', or 'other' if the filter has another id.
if redis.call('HGET', KEYS[1], 'id') ~= ARGV[1] then return 'other' end
local words = {unpack(KEYS, 2)}
for index = 3, #ARGV do words[#words + 1] = ARGV[index] end
redis.call(ARGV[2], unpack(words))
return 'ok'
