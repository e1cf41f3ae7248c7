-- UNKNOWN to DONE with an outcome, or to absent without: an operator found out.
-- ARGV: retention, then the outcome if there is one: kind, digest, and the payload if there is one

if redis.call('HGET', KEYS[1], 'state') ~= 'unknown' then return 0 end
if not ARGV[2] then return redis.call('DEL', KEYS[1]) end
finish(ARGV[1], ARGV[2], ARGV[3], ARGV[4])
return 1
