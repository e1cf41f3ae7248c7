-- Renew the lease of a RUNNING record.
-- ARGV: fence, nonce, call, lease

local answer = answered('running')
if answer then return answer end
hold(ARGV[4], redis.call('HGET', record, 'retention'))
return 1
