-- Let a RUNNING record name its task, and give its start; false if the token does not hold it.
-- ARGV: fence, nonce, call, the id of the task

local answer = answered('running')
if answer == 0 then return false end
if not answer then redis.call('HSET', record, 'task', ARGV[4], 'call', call) end
return redis.call('HGET', record, 'started_at')
