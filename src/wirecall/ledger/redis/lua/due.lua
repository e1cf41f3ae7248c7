-- Whether the sweep has something to do here: 1 for the record, plus 2 for its place among the newest, or 0.

local state, expires, started_at = unpack(redis.call('HMGET', record, 'state', 'expires', 'started_at'))
if not state then return 0 end
local is_due = state ~= 'unknown' and tonumber(expires) <= now
local is_lost = false
if newest and RANKS[state] then
  local place = redis.call('ZSCORE', newest, record)
  is_lost = not place or tonumber(place) ~= tonumber(place_of(state, started_at))
end
return (is_due and 1 or 0) + (is_lost and 2 or 0)
