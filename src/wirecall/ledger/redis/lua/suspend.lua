-- RUNNING to WAITING: the call needs input from its caller before it can go on.
-- ARGV: fence, nonce, retention, kind, digest, and the payload if there is one

if not held('running') then return 0 end
turn_with_outcome('waiting', ARGV[3], ARGV[4], ARGV[5], ARGV[6], 'attempts', '0')
return 1
