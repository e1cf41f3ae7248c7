-- RUNNING to UNKNOWN: the holder does not know how far it came.
-- ARGV: fence, nonce, call

local answer = answered('running')
if answer then return answer end
to_unknown(now)
return 1
