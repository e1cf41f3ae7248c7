-- Mark answers to calls without a key as written or undelivered, where this claim is the deliverer and it is not written yet.
-- KEYS: records. ARGV: for each of them the delivery, a space, and the deliverer

for place, name in ipairs(KEYS) do
  record = name
  local ending, claimer = string.match(ARGV[place], '^(%l+) (.*)$')
  local delivery, deliverer = unpack(redis.call('HMGET', record, 'delivery', 'deliverer'))
  if deliverer == claimer and (delivery == 'pending' or delivery == 'undelivered') then
    redis.call('HSET', record, 'delivery', ending, 'lost_at', whole(now))
    if ending == 'written' then match_no_more() else line_up() end
  end
end
