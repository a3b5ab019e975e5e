-- Uses: bloom
-- Look fingerprints up, and record those that are new, without a queue.
--
-- A worker numbers its commands. The script stores the number, and returns the one that it had
-- stored before: if that is not the next lower one, the server has lost changes, or the command was
-- repeated after a lost reply.
--
-- KEYS: the filter's hash; then keys of blocks, declared for a Cluster. ARGV: a map:
--   id            the id of the filter
--   version       the version of the generations
--   worker        the field of the worker's number
--   count_field   the field of the newest generation's count
--   generations   the generations, oldest first, as `bloom` gets them
-- then the number of this command; whether to record, 1 or 0; the bits of each fingerprint.
--
-- Returns {'other'} if the filter has another id, {'version'} if the generations have changed,
-- {'lost'} if keys are lost, or 'ok', and
--   for each fingerprint, the place of the generation that has it as a character, 'n' if it is new
--   how many requests are recorded in the newest generation
--   the number that was stored before; 0: none
local call, filter, given = redis.call, KEYS[1], cmsgpack.unpack(ARGV[1])
local state = call('HMGET', filter, 'id', 'version', given.count_field, given.worker)
if state[1] ~= given.id then return {'other'} end
if state[2] ~= given.version then return {'version'} end
call('HSET', filter, given.worker, ARGV[2])  -- refused if the memory is full
bloom = bloom(given.generations)
local answers = {}
for index = 4, #ARGV do
  local place = bloom.look_up(ARGV[index])
  answers[index - 3] = bloom.letter(place)
  if place == 0 and ARGV[3] == '1' then bloom.record(ARGV[index]) end
end
if bloom.is_lost then return {'lost'} end
local count = tonumber(state[3]) or 0
if bloom.recorded > 0 then count = call('HINCRBY', filter, given.count_field, bloom.recorded) end
return {'ok', table.concat(answers), count, tonumber(state[4]) or 0}
