-- What each script begins with. ARGV: a map in msgpack. Returns a map with a `status`: 'other' if
-- the map has the `id` of a filter, and the filter has another one; usually 'ok'.
local call, given = redis.call, cmsgpack.unpack(ARGV[1])
local function reply(values)
  values.status = values.status or 'ok'
  return cmsgpack.pack(values)
end
if given.id and call('HGET', KEYS[1], 'id') ~= given.id then return reply({status = 'other'}) end
