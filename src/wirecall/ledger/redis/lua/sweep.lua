-- Housekeeping on one record: what is due, and 1 if anything was.

local state, committed, expires = unpack(redis.call('HMGET', KEYS[1], 'state', 'committed', 'expires'))
if not state or state == 'unknown' or tonumber(expires) > now then return 0 end
if state == 'done' then
  bury()
elseif state == 'running' and committed == '1' then
  to_unknown()
else -- it is a tombstone, or nothing was done
  redis.call('DEL', KEYS[1])
end
return 1
