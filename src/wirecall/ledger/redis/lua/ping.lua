-- Prove that a record could be written: write one, and remove it in the same step, so that no reader sees it.

redis.call('HSET', record, 'state', 'ping')
return redis.call('DEL', record)
