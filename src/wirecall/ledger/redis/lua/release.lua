-- RUNNING to absent: the holder knows that nothing was done.
-- ARGV: fence, nonce

if not held('running') then return 0 end
return redis.call('DEL', KEYS[1])
