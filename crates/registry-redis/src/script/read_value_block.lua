-- KEYS: the key of the value block. Returns the server's time in us, and the value as
-- `write_value_block` stored it.
local time = redis.call('TIME')
return {time[1] * 1000000 + time[2], redis.call('GETEX', KEYS[1])}
