-- Uses: queue
-- Ask workers to end. KEYS: those of `redis.layout.KEYS`. ARGV: a map with the ids of `workers`.
local workers = queue.keys.workers
for _, worker in ipairs(cmsgpack.unpack(ARGV[1]).workers) do
  if redis.call('HEXISTS', workers, worker) == 1 then
    redis.call('HSET', workers, worker .. ':stop', 1)
  end
end
