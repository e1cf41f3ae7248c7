-- The state of the record, without the rest of it.

return told(unpack(redis.call('HMGET', KEYS[1], 'state', 'expires')))
