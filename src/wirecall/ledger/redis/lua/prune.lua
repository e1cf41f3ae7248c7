-- Take names out of a sorted set whose keys are gone: among the oldest, and among some that are chosen at random. A record
-- with a longer retention may be older than all that are gone. Gives how many were taken out.
-- KEYS: the set. ARGV: the lowest score, how many are looked at

local gone = 0
local function take_out(names)
  for _, name in ipairs(names) do
    if redis.call('EXISTS', name) == 0 then gone = gone + redis.call('ZREM', KEYS[1], name) end
  end
end
take_out(redis.call('ZRANGEBYSCORE', KEYS[1], ARGV[1], '+inf', 'LIMIT', 0, ARGV[2]))
take_out(redis.call('ZRANDMEMBER', KEYS[1], ARGV[2]))
return gone
