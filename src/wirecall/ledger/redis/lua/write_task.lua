-- Write a task that its record names, unless it is there; gives the time, or 0 if the id is the task of another record.
-- KEYS: the task. ARGV: the name of the record, its start, the document, ttl

local task = KEYS[1]
local name, started_at = unpack(redis.call('HMGET', task, 'record', 'started_at'))
if not name then
  redis.call(
    'HSET', task, 'record', ARGV[1], 'started_at', ARGV[2], 'version', '1', 'document', ARGV[3], 'is_ready', '0',
    'is_over', '0')
  redis.call('PEXPIRE', task, whole(ARGV[4] / 1000))
elseif name ~= ARGV[1] or started_at ~= ARGV[2] then
  return 0
end
return whole(now)
