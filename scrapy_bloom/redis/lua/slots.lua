-- Return slots of pending requests.
--
-- KEYS: pending. ARGV: `first`, where to begin in it, in the form of ZRANGEBYLEX.
--
-- Returns `slots`: at most 100, each with its hash, and after it its number of requests.
local slots, from = {}, given.first
for _ = 1, 100 do
  local member = call('ZRANGEBYLEX', KEYS[1], from, '+', 'LIMIT', 0, 1)[1]
  if not member then break end
  local slot = string.sub(member, 1, string.find(member, '\0', 5, true) - 1)
  from = '(' .. slot .. '\1'
  slots[#slots + 1] = slot
  slots[#slots + 1] = call('ZLEXCOUNT', KEYS[1], '[' .. slot .. '\0', from)
end
return reply({slots = slots})
