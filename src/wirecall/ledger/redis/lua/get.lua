-- The record as it stands.
-- ARGV: the state it must be in to be of interest, or nothing

if ARGV[1] and ARGV[1] ~= redis.call('HGET', record, 'state') then return false end
return view()
