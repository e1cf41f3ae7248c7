-- Renew the lease of a RUNNING record.
-- ARGV: fence, nonce, lease

if not held('running') then return 0 end
hold(ARGV[3], redis.call('HGET', KEYS[1], 'retention'))
return 1
