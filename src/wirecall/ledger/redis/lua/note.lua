-- Put records at their places among the newest of their methods.
-- KEYS: for each of them its name, and the set

for place = 1, #KEYS, 2 do
  record, newest, began = KEYS[place], KEYS[place + 1], nil
  local state = redis.call('HGET', record, 'state')
  if state and RANKS[state] then note(state) end
end
return 1
