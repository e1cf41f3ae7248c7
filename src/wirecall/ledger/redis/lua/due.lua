-- Whether the sweep has something to do here: 1 or 0.

local state, expires = unpack(redis.call('HMGET', record, 'state', 'expires'))
return (state and state ~= 'unknown' and tonumber(expires) <= now) and 1 or 0
