-- The record as it stands.
-- ARGV: the standing it must have to be of interest, or nothing

if ARGV[1] and ARGV[1] ~= standing() then return false end
return view()
