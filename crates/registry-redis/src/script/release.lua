-- KEYS: the lock. ARGV: claim, how to publish, message, channels. Answers 1 if it held the lock.
if holder(KEYS[1]) ~= ARGV[1] then
  return 0
end
redis.call('DEL', KEYS[1])
for i = 4, #ARGV do
  -- A hint: a user who may not publish must not hear that nothing was done.
  redis.pcall(ARGV[2], ARGV[i], ARGV[3])
end
return 1
