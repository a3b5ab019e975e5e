-- The bits of fingerprints in the keys of generations. A key is made when a bit in it is to be set.
--
-- A function that gets the generations, oldest first, each with the `prefix` of its keys,
-- `num_blocks` and `num_hashes`, and returns a table of functions, with `is_lost` (whether a key is
-- missing), and `recorded` (how many fingerprints were recorded).
local call = redis.call
local CHUNK_BLOCKS, BLOCK_BITS, BLOCK_BYTES = 15, 65536, 8192

return function(generations)
  local bloom, most = {is_lost = false, recorded = 0}, 0
  for _, generation in ipairs(generations) do
    most, generation.keys = math.max(most, generation.num_hashes), {}
  end
  local layout = '>' .. string.rep('H', 3 + most)  -- three of the block hash, and the positions

  -- Returns a key of a generation by its number.
  function bloom.key_of(generation, chunk)
    local key = generation.keys[chunk]
    if not key then
      local num_blocks = math.min(generation.num_blocks - chunk * CHUNK_BLOCKS, CHUNK_BLOCKS)
      key = {name = generation.prefix .. chunk, length = num_blocks * BLOCK_BYTES, chunk = chunk,
             generation = generation}
      generation.keys[chunk] = key
    end
    return key
  end

  -- Returns the key of a generation that has the block of a fingerprint, and the first bit of the
  -- block in it. The products of the block hash have too many bits for a number.
  function bloom.block_of(words, generation)
    local number, block = generation.num_blocks, 0
    for index = 3, 1, -1 do block = math.floor((block + words[index] * number) / 65536) end
    local chunk = math.floor(block / CHUNK_BLOCKS)
    return bloom.key_of(generation, chunk), (block - chunk * CHUNK_BLOCKS) * BLOCK_BITS
  end

  local unpacked = {}
  function bloom.words_of(bits)
    local words = unpacked[bits] or {struct.unpack(layout, bits)}
    unpacked[bits] = words
    return words
  end

  -- Returns whether a key was made, by the bitmap of its generation. The bit after those of all
  -- keys is set; without it, the bitmap is lost.
  function bloom.was_made(key)
    local bitmap = key.generation.prefix .. 'made'
    return call('GETBIT', bitmap, math.ceil(key.generation.num_blocks / CHUNK_BLOCKS)) == 0
        or call('GETBIT', bitmap, key.chunk) == 1
  end

  -- Returns whether a key exists. Without it, its blocks are empty if it was not made yet.
  function bloom.is_there(key)
    if key.is_there == nil then
      local length = call('STRLEN', key.name)
      key.is_there = length == key.length
      if not key.is_there and (length > 0 or bloom.was_made(key)) then bloom.is_lost = true end
    end
    return key.is_there
  end

  -- Makes a key that is not there. Returns whether it is there now.
  function bloom.make(key)
    if not bloom.is_there(key) and not bloom.is_lost then
      call('SETRANGE', key.name, key.length - 1, '\0')
      call('SETBIT', key.generation.prefix .. 'made', key.chunk, 1)
      key.is_there = true
    end
    return key.is_there
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
      local key, first = bloom.block_of(words, generations[place])
      if bloom.has_all(key, first, words, generations[place].num_hashes) then return place end
    end
    return 0
  end

  -- Records a fingerprint in the newest generation, and returns the place of that. One command sets
  -- the bits, because each command takes time.
  local arguments = {}
  function bloom.record(bits)
    local words, place, at = bloom.words_of(bits), #generations, 0
    local key, first = bloom.block_of(words, generations[place])
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
end
