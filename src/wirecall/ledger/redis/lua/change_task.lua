-- Change a task that has this version.
-- KEYS: the task. ARGV: version, call, document, is_ready, is_over

local task = KEYS[1]
local version, last = unpack(redis.call('HMGET', task, 'version', 'call'))
if last == ARGV[2] then return 1 end -- the driver has sent this very change before
if version ~= ARGV[1] then return 0 end
redis.call(
  'HSET', task, 'version', whole(version + 1), 'call', ARGV[2], 'document', ARGV[3], 'is_ready', ARGV[4], 'is_over', ARGV[5])
return 1
