-- KEYS: the lock. ARGV: the expected value, the new value (empty if the key is free), the time
-- until its end in ms, and, for a change that may let others in, publish command, message,
-- channels. Returns {1}, or {2, the value, the remaining time of the key in ms, time in us} if the
-- value has changed.
local value = redis.call('GETEX', KEYS[1]) or ''
if value ~= ARGV[1] then
  return {2, value, redis.call('PTTL', KEYS[1]), now_text()}
end
if ARGV[2] == '' then
  redis.call('DEL', KEYS[1])
else
  redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
end
for i = 6, #ARGV do
  redis.pcall(ARGV[4], ARGV[i], ARGV[5])
end
return {1}
