-- RUNNING to WAITING: the call needs input from its caller before it can continue.
-- ARGV: fence, nonce, call, retention, kind, digest, and the payload if there is one

local answer = answered('running')
if answer then return answer end
turn_with_outcome('waiting', ARGV[4], ARGV[5], ARGV[6], ARGV[7], 'attempts', '0', 'committed', '0')
return 1
