-- Housekeeping on one record: what is due, and 1 if anything was.

local state, committed, expires, lease_until = unpack(redis.call(
  'HMGET', record, 'state', 'committed', 'expires', 'lease_until'))
if not state or state == 'unknown' or tonumber(expires) > now then return 0 end
if state == 'done' then
  bury()
elseif state == 'running' and committed == '1' then
  to_unknown(tonumber(lease_until))
else -- it is a tombstone, or nothing was done
  match_no_more()
  remove()
end
return 1
