-- Mark a RUNNING record as committed and renew its lease; refused once the lease is over.
-- ARGV: fence, nonce, call, lease

local lease_until, retention, may_rerun = unpack(redis.call('HMGET', record, 'lease_until', 'retention', 'may_rerun'))
local answer = answered('running') or (tonumber(lease_until) <= now and 0)
if answer then return answer end
hold(ARGV[4], retention, '1', may_rerun, 'committed', '1')
return 1
