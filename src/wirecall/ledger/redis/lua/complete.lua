-- RUNNING or UNKNOWN to DONE: a late truth is welcome.
-- ARGV: fence, nonce, retention, kind, digest, and the payload if there is one

if not held('running', 'unknown') then return 0 end
finish(ARGV[3], ARGV[4], ARGV[5], ARGV[6])
return 1
