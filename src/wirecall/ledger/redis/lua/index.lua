-- Put the records and tasks of one step of a scan into the order of time; gives the cursor of the next step.
-- KEYS: the set of methods. ARGV: the prefix, the same as a pattern, the cursor, how many keys a step has

local prefix = ARGV[1]
local cursor, names = unpack(redis.call('SCAN', ARGV[3], 'MATCH', ARGV[2] .. '*', 'COUNT', ARGV[4], 'TYPE', 'hash'))
for _, name in ipairs(names) do
  local rest = string.sub(name, #prefix + 1)
  local method = string.match(rest, '^[^:]*:([^:]*):[^:]*$')
  local state, started_at = unpack(redis.call('HMGET', name, 'state', 'started_at'))
  if method and RANKS[state] and started_at then
    redis.call('SADD', KEYS[1], method)
    record, newest, began = name, prefix .. 'newest:' .. method, started_at
    note(state)
  elseif started_at and string.sub(rest, 1, 5) == 'task:' then
    redis.call('ZADD', prefix .. 'tasks-newest', started_at, name)
  end
end
return cursor
