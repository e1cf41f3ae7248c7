-- What every script begins with: the clock, and the writes that several transitions share. ledger.py puts this file, and
-- before it the constants MAX_ATTEMPTS, TOMBSTONE_FACTOR and GRACE, in front of each of the others.
--
-- KEYS[1] is the record, a hash; or a task, for the scripts that say so. Times and durations are whole microseconds. They stay below 2^53, so a Lua number holds
-- them exactly; but Lua prints 14 digits, so they are written with %.0f.
--
-- The record of a call without a key is named caller:method:{auto-likeness}-end. The same name without -end is the index of
-- that likeness: a sorted set of the records whose answers are not written, in the order in which a repetition looks at them.
-- A member is the end of a key and the deliverer. Name and index share a hash tag, so they are in one slot, and a script
-- that is sent to the one may touch the other. The index has no expiry: a clock that jumps forward would forget lost answers.
--
-- A script that fails halfway is not undone. So the first write carries the new state, and what follows it cannot fail.

if redis.replicate_commands then redis.replicate_commands() end -- before 7.0: without it, nothing may be written after TIME

local record = KEYS[1]
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]

local function whole(number)
  return string.format('%.0f', number)
end

-- The name of this call of a token. The record keeps the last one, so that a call which is sent twice is recognised.
local call = ''

-- The answer to a call of the token ARGV[1] (fence), ARGV[2] (nonce), where it needs no write: 0 unless the token holds the
-- record, and it is in one of these states; 1 if this very call, ARGV[3], has been here before.
local function answered(...)
  local state, fence, nonce, last = unpack(redis.call('HMGET', record, 'state', 'fence', 'nonce', 'call'))
  if fence ~= ARGV[1] or nonce ~= ARGV[2] then return 0 end
  if last == ARGV[3] then return 1 end
  call = ARGV[3]
  for _, allowed in ipairs({...}) do
    if state == allowed then return nil end
  end
  return 0
end

-- Each of these is one write, with whatever other fields the caller adds to it.

-- A lease from now on. The sweep looks at the record when lease and retention are over.
local function hold(lease, retention, ...)
  redis.call('HSET', record, 'lease_until', whole(now + lease), 'expires', whole(now + lease + retention), 'call', call, ...)
end

local function turn(state, kept, ...)
  redis.call('HSET', record, 'state', state, 'lease_until', '0', 'expires', whole(now + kept), 'call', call, ...)
end

local function to_unknown()
  turn('unknown', 0) -- it never expires: `due` and the sweep leave it alone
end

-- Both of these are for the record of a call without a key, and do nothing to others. A failure is passed over: while the slot
-- moves, the index may be at the other server. A claim looks at the records, so what is left in an index does no harm.

-- Put the record where its turn is in the index, unless it has left: the undelivered come first, then the lower fence.
local function line_up()
  local index, key = string.match(record, '^(.*{auto%-%x+})%-(%x+)$')
  if not index then return end
  local fence, delivery, deliverer = unpack(redis.call('HMGET', record, 'fence', 'delivery', 'deliverer'))
  if delivery == 'undelivered' then fence = whole(fence - 2^53) end
  if deliverer then redis.pcall('ZADD', index, 'XX', fence, key .. deliverer) end
end

-- Take it out of the index.
local function match_no_more()
  local index, key = string.match(record, '^(.*{auto%-%x+})%-(%x+)$')
  local deliverer = index and redis.call('HGET', record, 'deliverer')
  if deliverer then redis.pcall('ZREM', index, key .. deliverer) end
end

local function bury()
  local kept = (TOMBSTONE_FACTOR - 1) * redis.call('HGET', record, 'retention')
  turn('tombstone', kept)
  redis.call('HDEL', record, 'payload')
  -- Only a tombstone has an expiry of its own, a while after the sweep would remove it: a server whose clock jumps forward
  -- would remove every other record at once, and a retry would run.
  redis.call('PEXPIRE', record, whole((kept + GRACE) / 1000))
  match_no_more()
end

-- No payload is another thing than an empty one.
local function turn_with_outcome(state, kept, kind, digest, payload, ...)
  if payload then
    turn(state, kept, 'kind', kind, 'digest', digest, 'payload', payload, ...)
  else
    turn(state, kept, 'kind', kind, 'digest', digest, ...)
    redis.call('HDEL', record, 'payload')
  end
end

local function finish(retention, kind, digest, payload)
  turn_with_outcome('done', retention, kind, digest, payload, 'retention', retention, 'completed_at', whole(now))
end

-- Fields as one string, since the driver is pure Python and reads each element of an array by itself: their lengths (-1:
-- none), a line end, and then all of them.
local function joined(fields)
  local lengths = {}
  for place, field in ipairs(fields) do
    lengths[place] = field and #field or -1
    fields[place] = field or ''
  end
  return table.concat(lengths, ' ') .. '\n' .. table.concat(fields)
end

-- The record as a reader sees it, false if there is none.
local function view()
  local seen = redis.call(
    'HMGET', record, 'state', 'fence', 'nonce', 'fingerprint', 'committed', 'attempts', 'lease_until', 'started_at',
    'completed_at', 'kind', 'digest', 'payload', 'delivery', 'deliverer')
  if not seen[1] then return false end
  seen[7] = whole(math.max(0, seen[7] - now))
  return joined(seen)
end
