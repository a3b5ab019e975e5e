-- Uses: queue
-- Add rows of another queue.
--
-- KEYS: those of `redis.layout.KEYS`. ARGV: the `id` of the filter, and
--   rows          each a list of its id as a number, the name of the set that gets it, and the row
--                 as it is stored
for _, loaded in ipairs(given.rows) do
  local row = queue.parsed_row(struct.pack('>I8', loaded[1]), loaded[3])
  local has_page = queue.has(row, queue.ONCE) or queue.has(row, queue.WAS_TAKEN)
      or row.state ~= queue.QUEUED
  for _, page in ipairs(has_page and queue.pages_of(row) or row.hops) do queue.index(row, page) end
  queue.put(row, queue.keys[loaded[2]])
end
return reply({})
