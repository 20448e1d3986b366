-- KEYS: the lock. ARGV: claim, how to publish, message, channels. Answers 0 if it did not hold the lock; otherwise 1 more than listen to
-- the first channel.
if holder(KEYS[1]) ~= ARGV[1] then
  return 0
end
redis.call('DEL', KEYS[1])
-- A hint: a user who may not publish must not hear that nothing was done.
local told = redis.pcall(ARGV[2], ARGV[4], ARGV[3])
for i = 5, #ARGV do
  redis.pcall(ARGV[2], ARGV[i], ARGV[3])
end
return 1 + (tonumber(told) or 0)
