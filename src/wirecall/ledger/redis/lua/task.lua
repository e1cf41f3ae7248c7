-- The task as it stands, and the milliseconds that it has left; false if there is none.
-- KEYS: the task

local task = KEYS[1]
local seen = redis.call('HMGET', task, 'record', 'started_at', 'version', 'document', 'is_ready', 'is_over')
if not seen[1] then return false end
seen[7] = whole(redis.call('PTTL', task))
return joined(seen)
