-- The state of the record, without the rest of it.

return redis.call('HGET', record, 'state')
