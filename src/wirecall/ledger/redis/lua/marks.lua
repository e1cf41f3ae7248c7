-- The names of the marks of a channel that were made within a time, the oldest first.
-- KEYS: the set of the channel's marks; ARGV: the time

return redis.call('ZRANGEBYSCORE', KEYS[1], '(' .. whole(now - ARGV[1]), '+inf')
