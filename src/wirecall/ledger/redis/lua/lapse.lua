-- End the lease of a RUNNING record now, so that a retry need not wait for it.
-- ARGV: fence, nonce

if not held('running') then return 0 end
hold(0, redis.call('HGET', KEYS[1], 'retention'))
return 1
