-- RUNNING to UNKNOWN: the holder does not know how far it came.
-- ARGV: fence, nonce

if not held('running') then return 0 end
to_unknown()
return 1
