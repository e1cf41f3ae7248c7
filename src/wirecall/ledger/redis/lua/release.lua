-- RUNNING to absent: the holder knows that nothing was done.
-- ARGV: fence, nonce, call

local answer = answered('running')
if answer then return answer end
match_no_more()
return remove()
