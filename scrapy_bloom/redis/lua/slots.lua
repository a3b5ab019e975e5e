-- Uses: queue
-- Return at most 100 slots, each with its number of pending requests.
--
-- KEYS: those of `redis.layout.KEYS`. ARGV: a map of `first`, where to begin in pending, in the
-- form of ZRANGEBYLEX. Returns a map: `slots`, each with its hash, and before its number.
local pending, given = queue.keys.pending, cmsgpack.unpack(ARGV[1])
local slots, from = {}, given.first
for _ = 1, 100 do
  local member = redis.call('ZRANGEBYLEX', pending, from, '+', 'LIMIT', 0, 1)[1]
  if not member then break end
  local slot = string.sub(member, 1, string.find(member, '\0', 5, true) - 1)
  from = '(' .. slot .. '\1'
  slots[#slots + 1] = slot
  slots[#slots + 1] = redis.call('ZLEXCOUNT', pending, '[' .. slot .. '\0', from)
end
return cmsgpack.pack({slots = slots})
