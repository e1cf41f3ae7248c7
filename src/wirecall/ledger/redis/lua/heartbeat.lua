-- Renew the lease of a RUNNING record.
-- ARGV: fence, nonce, call, lease

local answer = answered('running')
if answer then return answer end
hold_on(ARGV[4])
return 1
