-- Keep a message to all processes of a channel.
-- KEYS: the set of the channel's marks, in the order of time; the mark. ARGV: its name, its content, its ttl, and how long the
-- set has its name

redis.call('SET', KEYS[2], ARGV[2], 'PX', whole(math.max(1, math.ceil(ARGV[3] / 1000))))
redis.call('ZADD', KEYS[1], whole(now), ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', whole(now - ARGV[4]))
redis.call('PEXPIRE', KEYS[1], whole(ARGV[4] / 1000))
return 1
