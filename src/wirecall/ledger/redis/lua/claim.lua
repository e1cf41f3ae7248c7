-- Apply `decide` of base.py and give the record back.
-- ARGV: fingerprint, nonce, lease, retention, on_crash, committed (0 or 1), continues (0 or 1), replicated (0 or 1)

local fingerprint, nonce, lease, retention, on_crash, committed, continues, replicated = unpack(ARGV)
local state, fence, old_fingerprint, was_committed, attempts, lease_until, expires, started_at, holder = unpack(redis.call(
  'HMGET', KEYS[1], 'state', 'fence', 'fingerprint', 'committed', 'attempts', 'lease_until', 'expires', 'started_at', 'nonce'))

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

local function run(fence, committed, attempts, started_at)
  hold(
    lease, retention, 'state', 'running', 'fence', whole(fence), 'nonce', nonce, 'fingerprint', fingerprint,
    'committed', committed, 'attempts', whole(attempts), 'started_at', started_at, 'retention', retention)
end

local verdict = decide()
if verdict == 'insert' then
  -- The clock is the fence, so that no fence comes back after the record was removed. Where the clock was set back since,
  -- the nonce still tells the two apart; and a record is only removed when nothing was done under it, or long after.
  run(now, committed, 1, whole(now))
elseif verdict == 'renew' then
  hold(lease, retention, 'state', 'running')
elseif verdict == 'take_over' then
  run(math.max(now, fence + 1), (was_committed == '1' and '1') or committed, attempts + 1, started_at)
  redis.call('HDEL', KEYS[1], 'kind', 'digest', 'payload') -- what it said while it was WAITING
elseif verdict == 'to_unknown' then
  to_unknown()
elseif verdict == 'to_tombstone' then
  bury()
elseif replicated == '1' then
  -- Replicas have to hold what the claim is told. WAIT only counts what the connection itself has written: so write it again.
  redis.call('HSET', KEYS[1], 'state', state)
end
return view()
