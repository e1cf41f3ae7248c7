-- UNKNOWN to DONE with an outcome, or to absent without: an operator found out. The standing counts.
-- ARGV: retention, the fence as the operator saw it or nothing, then the outcome if there is one: kind, digest, and the payload
-- if there is one

if standing() ~= 'unknown' then return 0 end
if ARGV[2] ~= '' and redis.call('HGET', record, 'fence') ~= ARGV[2] then return 0 end
if not ARGV[3] then
  match_no_more()
  return remove()
end
finish(ARGV[1], ARGV[3], ARGV[4], ARGV[5])
return 1
