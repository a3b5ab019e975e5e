-- The bits of fingerprints in the keys of the generations that are given, oldest first, each with
-- the `prefix` of its keys, `num_blocks` and `num_hashes`. A key is made when a bit in it is to be
-- set.
--
-- A table of functions, with `lost` (the place of a generation that has lost a key), and how many
-- fingerprints were `recorded` and keys `made`.
local CHUNK_BLOCKS, BLOCK_BITS, BLOCK_BYTES = 15, 65536, 8192
local bloom, generations, most = {recorded = 0, made = 0}, given.generations, 0
for _, generation in ipairs(generations) do
  most, generation.keys = math.max(most, generation.num_hashes), {}
end
local layout = '>' .. string.rep('H', 3 + most)  -- three of the block hash, and the positions

local unpacked = {}
function bloom.words_of(bits)
  local words = unpacked[bits] or {struct.unpack(layout, bits)}
  unpacked[bits] = words
  return words
end

-- Returns the key of a generation that has the block of a fingerprint, and the first bit of the
-- block in it. The products of the block hash have too many bits for a number.
function bloom.block_of(words, place)
  local generation, block = generations[place], 0
  local number, keys = generation.num_blocks, generation.keys
  for index = 3, 1, -1 do block = math.floor((block + words[index] * number) / 65536) end
  local chunk = math.floor(block / CHUNK_BLOCKS)
  if not keys[chunk] then
    local num_blocks = math.min(number - chunk * CHUNK_BLOCKS, CHUNK_BLOCKS)
    keys[chunk] = {name = generation.prefix .. chunk, length = num_blocks * BLOCK_BYTES,
                   chunk = chunk, place = place}
  end
  return keys[chunk], (block - chunk * CHUNK_BLOCKS) * BLOCK_BITS
end

-- Returns whether a key was made, by the bitmap of its generation. The bit after those of all keys
-- is set; without it, the bitmap is lost.
function bloom.was_made(key)
  local generation = generations[key.place]
  local bitmap, num_keys = generation.prefix .. 'made', generation.num_blocks / CHUNK_BLOCKS
  return call('GETBIT', bitmap, math.ceil(num_keys)) == 0
      or call('GETBIT', bitmap, key.chunk) == 1
end

-- Returns whether a key exists. Without it, its blocks are empty if it was not made yet.
function bloom.is_there(key)
  if key.is_there == nil then
    local length = call('STRLEN', key.name)
    key.is_there = length == key.length
    if not key.is_there and (length > 0 or bloom.was_made(key)) then bloom.lost = key.place end
  end
  return key.is_there
end

-- Makes a key that is not there. Returns whether it is there now.
function bloom.make(key)
  if not bloom.is_there(key) and not bloom.lost then
    call('SETRANGE', key.name, key.length - 1, '\0')
    call('SETBIT', generations[key.place].prefix .. 'made', key.chunk, 1)
    key.is_there, bloom.made = true, bloom.made + 1
  end
  return key.is_there
end

-- Makes the key in which a fingerprint would be recorded.
function bloom.make_for(bits)
  bloom.make(bloom.block_of(bloom.words_of(bits), #generations))
end

function bloom.has_all(key, first, words, number)
  if not bloom.is_there(key) then return false end
  for index = 4, number + 3 do
    if call('GETBIT', key.name, first + words[index]) == 0 then return false end
  end
  return true
end

-- Returns the place of the newest generation that has a fingerprint, 0 if none has.
function bloom.look_up(bits)
  local words = bloom.words_of(bits)
  for place = #generations, 1, -1 do
    local key, first = bloom.block_of(words, place)
    if bloom.has_all(key, first, words, generations[place].num_hashes) then return place end
  end
  return 0
end

-- Records a fingerprint in the newest generation, and returns the place of that. One command sets
-- the bits, because each command takes time.
local arguments = {}
function bloom.record(bits)
  local words, place, at = bloom.words_of(bits), #generations, 0
  local key, first = bloom.block_of(words, place)
  if not bloom.make(key) then return 0 end
  for index = 4, generations[place].num_hashes + 3 do
    arguments[at + 1], arguments[at + 2], arguments[at + 4] = 'SET', 'u1', '1'
    arguments[at + 3] = first + words[index]
    at = at + 4
  end
  call('BITFIELD', key.name, unpack(arguments, 1, at))
  bloom.recorded = bloom.recorded + 1
  return place
end

return bloom
