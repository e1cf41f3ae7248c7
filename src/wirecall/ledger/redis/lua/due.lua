-- Whether the sweep has something to do here: 1 or 0.

local expires = redis.call('HGET', KEYS[1], 'expires')
return (expires and tonumber(expires) <= now) and 1 or 0
