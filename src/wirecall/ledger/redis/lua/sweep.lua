-- Housekeeping on one record: what is due, and 1 if anything was.

local state, expires = unpack(redis.call('HMGET', KEYS[1], 'state', 'expires'))
if not state or tonumber(expires) > now then return 0 end
if state == 'done' then
  bury()
elseif state == 'tombstone' or state == 'unknown' then
  redis.call('DEL', KEYS[1])
else
  to_unknown()
end
return 1
