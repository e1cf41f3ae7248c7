-- Spend from a limit of calls (GCRA): 0 if the call may run, else the time until it may.
-- KEYS: the time at which nothing is spent any more; ARGV: cost, burst

local free = tonumber(redis.call('GET', KEYS[1])) or 0
if free < now then free = now end
free = free + ARGV[1]
local wait = free - ARGV[2] - now
if wait > 0 then return math.ceil(wait) end
redis.call('SET', KEYS[1], whole(free), 'PX', whole(math.ceil((free - now) / 1000)))
return 0
