-- Take names out of a sorted set whose keys are gone; gives how many.
-- KEYS: the set. ARGV: the lowest score, how many are looked at

local gone = 0
for _, name in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], ARGV[1], '+inf', 'LIMIT', 0, ARGV[2])) do
  if redis.call('EXISTS', name) == 0 then gone = gone + redis.call('ZREM', KEYS[1], name) end
end
return gone
