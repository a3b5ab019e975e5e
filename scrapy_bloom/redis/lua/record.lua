-- Uses: bloom
-- Look fingerprints up, and record those that are new, without a queue.
--
-- KEYS: the filter's hash, and a key that does not exist. ARGV: the `id` of the filter, `version`,
-- `generations` and `count_field` as `batch` has them, and
--   bits          of the fingerprints
--   records       whether to record
--
-- Returns the status 'version' if the generations have changed, 'lost' if keys are lost, with the
-- place of their generation; else
--   places        for each fingerprint, the place of the generation that has it; 0 if it is new
--   count         how many requests are recorded in the newest generation
local state = call('HMGET', KEYS[1], 'version', given.count_field)
if state[1] ~= given.version then return reply({status = 'version'}) end
local places, count = {}, tonumber(state[2]) or 0
for index, bits in ipairs(given.bits) do
  places[index] = bloom.look_up(bits)
  if places[index] == 0 and given.records then bloom.record(bits) end
end
if bloom.lost then return reply({status = 'lost', place = bloom.lost}) end
if bloom.recorded > 0 then
  count = call('HINCRBY', KEYS[1], given.count_field, bloom.recorded)
end
return reply({places = places, count = count})
