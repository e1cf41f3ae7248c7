-- Apply `decide` of base.py, for a call without a key first `recognise`, and give the record back.
-- ARGV: fingerprint, nonce, terms; the params, if they are recorded; and the ends of the keys `beside`. The terms are one
-- string, since the driver takes its time over each argument: lease, retention, on_crash; in one word committed, continues,
-- replicated, keyless and recorded, each 0 or 1, and the window; and where there is a likeness, the end of the key.
--
-- With a likeness, KEYS[1] is its index, and the reply begins with the end of the record's key. The names of the records are
-- made here, so they are not among the KEYS: they have the hash tag of the index, so they are in its slot. If KEYS named the
-- new record as well, a cluster would refuse all such claims while it moves the slot (TRYAGAIN).

local fingerprint, nonce, terms = unpack(ARGV, 1, 3)
local lease, retention, on_crash, committed, continues, replicated, keyless, recorded, window, own =
  string.match(terms, '(%d+) (%d+) (%l+) (.)(.)(.)(.)(.)(%d*) ?(%S*)')
local index, verdict = own ~= '' and KEYS[1], nil
local params = recorded == '1' and ARGV[4]
local may_rerun = on_crash == 'unknown' and '0' or '1'

if index then
  window, record = tonumber(window), index .. '-' .. own
  local beside, found, gone = {}, {}, {}
  for place = params and 5 or 4, #ARGV do beside[ARGV[place]] = true end

  local function recognise(name, is_beside)
    local state, delivery, deliverer, lost_at, completed_at, taken_at, lease_until = unpack(redis.call(
      'HMGET', name, 'state', 'delivery', 'deliverer', 'lost_at', 'completed_at', 'taken_at', 'lease_until'))
    if not state then return 'gone' end
    if deliverer == nonce then return 'match' end
    if state == 'tombstone' then return 'pass' end
    if state == 'unknown' then
      return now - math.max(delivery == 'undelivered' and lost_at or 0, taken_at or 0) <= window and 'match' or 'pass'
    end
    if delivery == 'undelivered' then return (state == 'running' or now - lost_at <= window) and 'match' or 'pass' end
    if delivery ~= 'pending' or is_beside then return 'pass' end
    if state == 'running' then
      local since = now - lease_until
      return since < 0 and 'wait' or since <= window and 'match' or 'pass'
    end
    if state == 'done' then
      local since = now - math.max(completed_at, taken_at or 0)
      return since < tonumber(lease) and 'wait' or since <= lease + window and 'match' or 'pass'
    end
    return 'pass'
  end

  local members = redis.call('ZRANGE', index, 0, -1, 'WITHSCORES')
  for place = 1, #members, 2 do
    -- An undelivered answer, or an unknown one.
    local member, is_first = members[place], string.sub(members[place + 1], 1, 1) == '-'
    local key, deliverer = string.sub(member, 1, #own), string.sub(member, #own + 1)
    local is_mine = deliverer == nonce -- this claim has been here before: whatever was lost since, it keeps what it took
    -- Equal calls at once may be many: those of this process are passed over without a look at their records.
    if is_mine or is_first or not beside[key] then
      local recognition = recognise(index .. '-' .. key, beside[key])
      if recognition == 'gone' then gone[#gone + 1] = member end
      if is_mine or not found[recognition] then found[recognition] = member end
    end
  end

  local taken = found.match or found.wait
  if taken then
    own = string.sub(taken, 1, #own)
    record = index .. '-' .. own
    if found.match then
      redis.call('HSET', record, 'delivery', 'pending', 'deliverer', nonce, 'taken_at', whole(now))
      redis.call('ZREM', index, taken)
      redis.call('ZADD', index, redis.call('HGET', record, 'fence'), own .. nonce)
    else
      verdict = 'leave'
    end
  elseif gone[1] then
    -- Such a record was removed by hand; or its slot moves, and it is still at the other server. The caller finds out.
    return gone
  end
end

local state, fence, old_fingerprint, was_committed, attempts, lease_until, expires, started_at, holder, version =
  unpack(redis.call(
    'HMGET', record, 'state', 'fence', 'fingerprint', 'committed', 'attempts', 'lease_until', 'expires', 'started_at',
    'nonce', 'v'))
check_version(version)

local function decide()
  if not state then return 'insert' end
  if old_fingerprint ~= fingerprint then return 'leave' end
  if holder == nonce and (state == 'running' or state == 'unknown') then return 'renew' end
  if state == 'done' and tonumber(expires) <= now then return 'to_tombstone' end
  if state == 'waiting' and continues == '1' then return 'take_over' end
  if state ~= 'running' or tonumber(lease_until) > now then return 'leave' end
  if was_committed == '0' then return 'take_over' end
  if on_crash == 'unknown' or tonumber(attempts) >= MAX_ATTEMPTS then return 'to_unknown' end
  return 'take_over'
end

local function run(fence, committed, attempts, started_at, ...)
  hold(
    lease, retention, committed, may_rerun, 'state', 'running', 'fence', whole(fence), 'nonce', nonce, 'fingerprint', fingerprint,
    'committed', committed, 'attempts', whole(attempts), 'started_at', started_at, 'retention', retention, 'v', VERSION, ...)
  if may_rerun == '1' then
    redis.call('HSET', record, 'may_rerun', '1')
  elseif state then -- an earlier claim may have set it
    redis.call('HDEL', record, 'may_rerun')
  end
  began = started_at
  note('running')
end

began = started_at or nil
verdict = verdict or decide()
if verdict == 'insert' then
  -- The clock is the fence, so that no fence comes back after the record was removed. Where the clock was set back since,
  -- the nonce still tells the two apart; and a record is only removed when nothing was done under it, or long after.
  if keyless == '1' then
    run(now, committed, 1, whole(now), 'delivery', 'pending', 'deliverer', nonce)
    if index then redis.call('ZADD', index, whole(now), own .. nonce) end
  else
    run(now, committed, 1, whole(now))
  end
  if params then redis.call('HSET', record, 'params', params) end
elseif verdict == 'renew' then
  hold(lease, retention, was_committed, may_rerun, 'state', 'running')
  note('running')
elseif verdict == 'take_over' then
  run(math.max(now, fence + 1), (was_committed == '1' and '1') or committed, attempts + 1, started_at)
  redis.call('HDEL', record, 'kind', 'digest', 'payload') -- what it said while it was WAITING
  line_up()
elseif verdict == 'to_unknown' then
  to_unknown(tonumber(lease_until))
elseif verdict == 'to_tombstone' then
  bury()
elseif replicated == '1' then
  -- Replicas must hold what the claim returns. WAIT counts only what this connection has written, so write it again.
  redis.call('HSET', record, 'state', state)
end
if state == 'unknown' and index then line_up() end -- its answer was taken over, and its turn stays
return index and own .. view() or view()
