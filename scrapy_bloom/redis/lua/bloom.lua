-- The bits of fingerprints in the keys of generations. A key is made when a bit in it is to be set.
--
-- A function that gets the generations, oldest first, each with the `prefix` of its keys,
-- `num_blocks` and `num_hashes`, and returns a table of functions, with `is_lost` (whether a key is
-- missing), and `recorded` (how many fingerprints were recorded).
local call = redis.call
local CHUNK_BLOCKS, BLOCK_BITS, BLOCK_BYTES = 15, 65536, 8192

return function(generations)
  local bloom, most = {is_lost = false, recorded = 0}, 0
  for _, generation in ipairs(generations) do most = math.max(most, generation.num_hashes) end
  local layout = '>' .. string.rep('H', 3 + most)

  -- Returns a key of a generation by its number.
  function bloom.key_of(generation, chunk)
    local rest = generation.num_blocks - chunk * CHUNK_BLOCKS
    return {
      name = generation.prefix .. chunk,
      length = math.min(rest, CHUNK_BLOCKS) * BLOCK_BYTES,
      generation = generation,
      chunk = chunk,
    }
  end

  -- Returns the key of a generation that has the block of a fingerprint, with the first bit of the
  -- block in it. The products of the block hash have too many bits for a number.
  function bloom.block_of(words, generation)
    local number, block = generation.num_blocks, 0
    for index = 3, 1, -1 do block = math.floor((block + words[index] * number) / 65536) end
    local chunk = math.floor(block / CHUNK_BLOCKS)
    local key = bloom.key_of(generation, chunk)
    key.first = (block - chunk * CHUNK_BLOCKS) * BLOCK_BITS
    return key
  end

  local located = {}
  function bloom.locate(bits)
    local found = located[bits]
    if not found then
      found = {words = {struct.unpack(layout, bits)}}  -- three of the block hash, and the positions
      for place, generation in ipairs(generations) do
        found[place] = bloom.block_of(found.words, generation)
      end
      located[bits] = found
    end
    return found
  end

  -- Returns whether a key was made, by the bitmap of its generation. The bit after those of all
  -- keys is set; without it, the bitmap is lost.
  local has_bitmap = {}
  function bloom.was_made(key)
    local bitmap = key.generation.prefix .. 'made'
    if has_bitmap[bitmap] == nil then
      local num_keys = math.ceil(key.generation.num_blocks / CHUNK_BLOCKS)
      has_bitmap[bitmap] = call('GETBIT', bitmap, num_keys) == 1
    end
    return not has_bitmap[bitmap] or call('GETBIT', bitmap, key.chunk) == 1
  end

  -- Returns whether a key exists. Without it, its blocks are empty if it was not made yet.
  local there = {}
  function bloom.is_there(key)
    if there[key.name] == nil then
      local length = call('STRLEN', key.name)
      there[key.name] = length == key.length
      if length ~= key.length and (length > 0 or bloom.was_made(key)) then bloom.is_lost = true end
    end
    return there[key.name]
  end

  -- Makes a key that is not there. Returns whether it is there now.
  function bloom.make(key)
    if bloom.is_there(key) or bloom.is_lost then return there[key.name] end
    call('SETRANGE', key.name, key.length - 1, '\0')
    call('SETBIT', key.generation.prefix .. 'made', key.chunk, 1)
    there[key.name] = true
    return true
  end

  function bloom.has_all(key, words, number)
    if not bloom.is_there(key) then return false end
    for index = 4, number + 3 do
      if call('GETBIT', key.name, key.first + words[index]) == 0 then return false end
    end
    return true
  end

  -- Returns the place of the newest generation that has a fingerprint, 0 if none has.
  function bloom.look_up(bits)
    local found = bloom.locate(bits)
    for place = #generations, 1, -1 do
      local number = generations[place].num_hashes
      if bloom.has_all(found[place], found.words, number) then return place end
    end
    return 0
  end

  -- Records a fingerprint in the newest generation, and returns the place of that. One command sets
  -- the bits, because each command takes time.
  local arguments = {}
  function bloom.record(bits)
    local found, place = bloom.locate(bits), #generations
    local key, words, number = found[place], found.words, generations[place].num_hashes
    if not bloom.make(key) then return 0 end
    local first, at = key.first, 0
    for index = 4, number + 3 do
      arguments[at + 1], arguments[at + 2], arguments[at + 4] = 'SET', 'u1', '1'
      arguments[at + 3] = first + words[index]
      at = at + 4
    end
    call('BITFIELD', key.name, unpack(arguments, 1, at))
    bloom.recorded = bloom.recorded + 1
    return place
  end

  function bloom.letter(place)
    return place == 0 and 'n' or string.char(place)
  end

  return bloom
end
