-- What every script begins with: the clock, and the writes that several transitions share. ledger.py puts this file, and
-- before it the constants MAX_ATTEMPTS, TOMBSTONE_FACTOR, UNKNOWN_AFTER, GRACE and VERSION, in front of each of the others.
--
-- KEYS[1] is the record, a hash; or a task, for the scripts that say so. Times and durations are whole microseconds. They stay below 2^53, so a Lua number holds
-- them exactly; but Lua prints 14 digits, so they are written with %.0f.
--
-- The record of a call without a key is named caller:method:{auto-likeness}-end. The same name without -end is the index of
-- that likeness: a sorted set of the records whose answers are not written, in the order in which a repetition looks at them.
-- A member is the end of a key and the deliverer. Name and index share a hash tag, so they are in one slot, and a script
-- that is sent to the one may touch the other. The index has no expiry: a clock that jumps forward would forget lost answers.
--
-- For operators, each method has a sorted set of its records, KEYS[2], in the order of their states and then of their starts.
-- In a cluster there is none, since the records of a method are in many slots. A process of the version before does not
-- write it; the sweep mends that.
--
-- A script that fails halfway is not undone. So the first write carries the new state, and what follows it cannot fail.

if redis.replicate_commands then redis.replicate_commands() end -- before 7.0: without it, nothing may be written after TIME

local record = KEYS[1]
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]

local function whole(number)
  return string.format('%.0f', number)
end

local newest = KEYS[2]
local RANKS = {running = 0, waiting = 1, unknown = 2, done = 3, tombstone = 4}

-- When the record began, and the state that it had, if the script has read them.
local began, was

-- The place of a record in the set of its method: a rank of 2^50 microseconds for each state, counted from 2020.
local function place_of(state, started_at)
  return whole(RANKS[state] * 2^50 + math.max(0, started_at - 1577836800000000))
end

local function note(state)
  if newest then
    redis.call('ZADD', newest, place_of(state, began or redis.call('HGET', record, 'started_at')), record)
  end
end

local function remove()
  if newest then redis.call('ZREM', newest, record) end
  return redis.call('DEL', record)
end

-- The version of the wirecall that made a record, in its field v; 1 where it has none. A record of the next version can be
-- used, since a version only adds fields; one of a later version cannot, and the script ends with an error.
local function check_version(version)
  if version and tonumber(version) > VERSION + 1 then
    error(string.format(
      'the record has version %d, and this wirecall knows version %d: upgrade this one', version, VERSION), 0)
  end
end

-- The name of this call of a token. The record keeps the last one, so that a call which is sent twice is recognised.
local call = ''

-- The answer to a call of the token ARGV[1] (fence), ARGV[2] (nonce), where it needs no write: 0 unless the token holds the
-- record, and it is in one of these states; 1 if this very call, ARGV[3], has been here before.
local function answered(...)
  local fence, nonce, last
  was, fence, nonce, last, began = unpack(redis.call('HMGET', record, 'state', 'fence', 'nonce', 'call', 'started_at'))
  if fence ~= ARGV[1] or nonce ~= ARGV[2] then return 0 end
  if last == ARGV[3] then return 1 end
  call = ARGV[3]
  for _, allowed in ipairs({...}) do
    if was == allowed then return nil end
  end
  return 0
end

-- Each of these is one write, with whatever other fields the caller adds to it.

-- A lease from now on. The sweep looks at the record when lease and retention are over; or soon after the lease, where then
-- only a person can tell how it ended: it is committed ('1'), and no retry may run it again (may_rerun is not '1').
local function hold(lease, retention, committed, may_rerun, ...)
  local kept = tonumber(retention)
  if committed == '1' and may_rerun ~= '1' then kept = math.min(UNKNOWN_AFTER, kept) end
  redis.call('HSET', record, 'lease_until', whole(now + lease), 'expires', whole(now + lease + kept), 'call', call, ...)
end

-- The same for a holder, whose record has the rest.
local function hold_on(lease)
  hold(lease, unpack(redis.call('HMGET', record, 'retention', 'committed', 'may_rerun')))
end

-- Whether the run counts as unknown: it is committed, and its lease is over.
local function is_dead()
  local state, committed, lease_until = unpack(redis.call('HMGET', record, 'state', 'committed', 'lease_until'))
  return state == 'running' and committed == '1' and tonumber(lease_until) <= now
end

-- The state that counts, false if there is no record.
local function standing()
  return is_dead() and 'unknown' or redis.call('HGET', record, 'state')
end

local function turn(state, kept, ...)
  redis.call('HSET', record, 'state', state, 'lease_until', '0', 'expires', whole(now + kept), 'call', call, ...)
  note(state)
end

-- Both of these are for the record of a call without a key, and do nothing to others. A failure is passed over: while the slot
-- moves, the index may be at the other server. A claim looks at the records, so an outdated entry of an index does no harm.

-- Put the record where its turn is in the index, unless it has left: the undelivered come first, then the unknown, then the
-- lower fence. (A fence is below 2^52.)
local function line_up()
  local index, key = string.match(record, '^(.*{auto%-%x+})%-(%x+)$')
  if not index then return end
  local fence, delivery, deliverer, state = unpack(redis.call('HMGET', record, 'fence', 'delivery', 'deliverer', 'state'))
  if delivery == 'undelivered' then
    fence = whole(fence - 2^53)
  elseif state == 'unknown' then
    fence = whole(fence - 2^52)
  end
  if deliverer then redis.pcall('ZADD', index, 'XX', fence, key .. deliverer) end
end

-- Take it out of the index.
local function match_no_more()
  local index, key = string.match(record, '^(.*{auto%-%x+})%-(%x+)$')
  local deliverer = index and redis.call('HGET', record, 'deliverer')
  if deliverer then redis.pcall('ZREM', index, key .. deliverer) end
end

-- Without an answer, the time of a loss begins with the end of the run. The record never expires: `due` and the sweep leave
-- it alone.
local function to_unknown(ended)
  local delivery, taken_at = unpack(redis.call('HMGET', record, 'delivery', 'taken_at'))
  if delivery then
    turn('unknown', 0, 'taken_at', whole(math.max(taken_at or 0, ended)))
    line_up()
  else
    turn('unknown', 0)
  end
end

-- What remains of a record that is a tombstone, beside its state and its times.
local REMAINS = {
  'fence', 'nonce', 'fingerprint', 'committed', 'attempts', 'started_at', 'completed_at', 'kind', 'digest', 'delivery',
  'deliverer', 'task', 'v'}

-- The hash is made again: one that has held a long payload takes three times the memory, also after the payload is gone.
local function bury()
  local kept = (TOMBSTONE_FACTOR - 1) * redis.call('HGET', record, 'retention')
  local values = redis.call('HMGET', record, unpack(REMAINS))
  local tombstone = {'state', 'tombstone', 'lease_until', '0', 'expires', whole(now + kept)}
  for place, field in ipairs(REMAINS) do
    if values[place] then
      tombstone[#tombstone + 1] = field
      tombstone[#tombstone + 1] = values[place]
    end
  end
  redis.call('DEL', record)
  redis.call('HSET', record, unpack(tombstone))
  note('tombstone')
  -- Redis itself removes only a tombstone, a while after the sweep would remove it: a server whose clock jumps forward
  -- would remove every other record at once, and a retry would run.
  redis.call('PEXPIRE', record, whole((kept + GRACE) / 1000))
  match_no_more()
  if newest then
    -- The oldest tombstones are the first that Redis removes.
    for _, name in ipairs(redis.call('ZRANGEBYSCORE', newest, whole(RANKS.tombstone * 2^50), '+inf', 'LIMIT', 0, 2)) do
      if redis.call('EXISTS', name) == 0 then redis.call('ZREM', newest, name) end
    end
  end
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
  local before = was or redis.call('HGET', record, 'state')
  turn_with_outcome('done', retention, kind, digest, payload, 'retention', retention, 'completed_at', whole(now))
  if before == 'unknown' then line_up() end
end

-- Fields as one string, since the driver is pure Python and reads the elements of an array one by one: their lengths
-- (-1: none), a line end, and then all of them.
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
    'completed_at', 'kind', 'digest', 'payload', 'delivery', 'deliverer', 'params', 'v')
  check_version(table.remove(seen))
  if not seen[1] then return false end
  seen[7] = whole(math.max(0, seen[7] - now))
  return joined(seen)
end
