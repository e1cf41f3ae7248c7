-- The standing of the record, without the rest of it.

return standing()
