-- Uses: queue
-- Make rows pending as they first entered, with no tries, or drop them, some at a time. Unreadable
-- ones become pending as they are.
--
-- KEYS: those of `redis.layout.KEYS`. ARGV:
--   from          'pending', 'kept', 'dead' or 'unreadable'
--   to            'pending', or '' to drop the rows
--   first, last   where to begin and end in the sorted set, in the form of ZRANGEBYLEX
--   slot          only rows of this slot; false: of all
--
-- Returns `number` of the rows that were moved, and `first` of the next call; '' at the end.
local keys = queue.keys
local from, number, next_one = keys[given.from], 0, given.first
while queue.may_move() do
  local member = queue.first_in(from, next_one, given.last)
  next_one = member and '(' .. member or ''
  if not member then break end
  local row = queue.row_of(from, member)
  local is_of_slot = row
      and (not given.slot or string.sub(row.order, 1, #given.slot + 1) == given.slot .. '\0')
  if is_of_slot and row.state ~= queue.WAITING then
    number = number + 1
    if given.to == '' then
      queue.drop(row)
    elseif from == keys.unreadable then
      queue.put(row, keys.pending)
    else
      queue.try_again(row, 0)
    end
  end
end
if given.to ~= '' and number > 0 then call('HDEL', keys.filter, 'ended') end
return reply({number = number, first = next_one})
