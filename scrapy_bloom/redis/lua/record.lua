-- Uses: bloom
-- Look fingerprints up, and record those that are new, without a queue.
--
-- KEYS: the filter's hash; then keys of blocks, declared for a Cluster. ARGV: a map:
--   id            the id of the filter
--   version       the version of the generations
--   count_field   the field of the newest generation's count
--   generations   the generations, oldest first, as `bloom` gets them
-- then whether to record, 1 or 0; the bits of each fingerprint.
--
-- Returns {'other'} if the filter has another id, {'version'} if the generations have changed,
-- {'lost'} if keys are lost, or 'ok', and
--   for each fingerprint, the place of the generation that has it; 0 if it is new
--   how many requests are recorded in the newest generation
local call, filter, given = redis.call, KEYS[1], cmsgpack.unpack(ARGV[1])
local state = call('HMGET', filter, 'id', 'version', given.count_field)
if state[1] ~= given.id then return {'other'} end
if state[2] ~= given.version then return {'version'} end
bloom = bloom(given.generations)
local places = {}
for index = 3, #ARGV do
  local place = bloom.look_up(ARGV[index])
  places[index - 2] = place
  if place == 0 and ARGV[2] == '1' then bloom.record(ARGV[index]) end
end
if bloom.is_lost then return {'lost'} end
local count = tonumber(state[3]) or 0
if bloom.recorded > 0 then count = call('HINCRBY', filter, given.count_field, bloom.recorded) end
return {'ok', places, count}
