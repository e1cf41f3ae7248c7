-- The state of the record, without the rest of it.

return redis.call('HGET', KEYS[1], 'state')
