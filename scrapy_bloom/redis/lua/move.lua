-- Uses: queue
-- Make rows pending as they first entered, with no tries, or drop them, some at a time. Unreadable
-- ones become pending as they are.
--
-- KEYS: those of `redis.layout.KEYS`. ARGV: a map:
--   from          'pending', 'kept', 'dead' or 'unreadable'
--   to            'pending', or '' to drop the rows
--   first, last   where to begin and end in the sorted set, in the form of ZRANGEBYLEX
--   slot          only rows of this slot; false: of all
--
-- Returns a map: `number` of the rows that were moved, and `first` of the next call; '' at the end.
local call, keys = redis.call, queue.keys
local given = cmsgpack.unpack(ARGV[1])
local from, number, next_one = keys[given.from], 0, given.first

local function is_meant(row)
  local slot = given.slot
  return row.state ~= queue.WAITING
      and (not slot or string.sub(row.order, 1, #slot + 1) == slot .. '\0')
end

local function move(row)
  if given.to == '' then
    queue.drop(row)
  elseif from == keys.unreadable then
    queue.put(row, keys.pending)
  else
    queue.try_again(row, 0)
  end
end

while queue.may_move() do
  local member = queue.first_in(from, next_one, given.last)
  if not member then
    next_one = ''
    break
  end
  next_one = '(' .. member
  local row = queue.row_of(from, member)
  if row and is_meant(row) then
    move(row)
    number = number + 1
  end
end
if given.to ~= '' and number > 0 then call('HDEL', keys.filter, 'ended') end
return cmsgpack.pack({number = number, first = next_one})
