-- KEYS: the waiting claims of a lock. Returns the server's time in us, and all fields with values.
local time = redis.call('TIME')
return {time[1] * 1000000 + time[2], redis.call('HGETALL', KEYS[1])}
