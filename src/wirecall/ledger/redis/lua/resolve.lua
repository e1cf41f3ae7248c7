-- UNKNOWN to DONE with an outcome, or to absent without: an operator found out. The standing counts.
-- ARGV: retention, then the outcome if there is one: kind, digest, and the payload if there is one

if standing() ~= 'unknown' then return 0 end
if not ARGV[2] then
  match_no_more()
  return remove()
end
finish(ARGV[1], ARGV[2], ARGV[3], ARGV[4])
return 1
