-- The records of a caller among the next names of a set, from the newest down: places and names, in turn. Before them stands
-- the place at which the next step begins, -1 at the end of the range.
-- KEYS: the set. ARGV: the highest place, the lowest, how many names are looked at, how the names of the caller begin

local names = redis.call('ZREVRANGEBYSCORE', KEYS[1], ARGV[1], ARGV[2], 'LIMIT', 0, ARGV[3])
local beginning, found = ARGV[4], {'-1'}
if #names == tonumber(ARGV[3]) then
  local last = redis.call('ZSCORE', KEYS[1], names[#names])
  found[1] = whole(last - 1)
  -- Others may have begun at the same moment as the last one. A name may be there twice then.
  for _, name in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], last, last)) do names[#names + 1] = name end
end
for _, name in ipairs(names) do
  if string.sub(name, 1, #beginning) == beginning then
    found[#found + 1] = redis.call('ZSCORE', KEYS[1], name)
    found[#found + 1] = name
  end
end
return found
