-- Mark a RUNNING record as committed and renew its lease; refused once the lease is over.
-- ARGV: fence, nonce, lease

local lease_until, retention = unpack(redis.call('HMGET', KEYS[1], 'lease_until', 'retention'))
if not held('running') or tonumber(lease_until) <= now then return 0 end
hold(ARGV[3], retention, 'committed', '1')
return 1
