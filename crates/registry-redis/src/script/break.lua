-- KEYS: the lock. ARGV: how to publish, message, channels. Answers 1 if somebody held it.
if not holder(KEYS[1]) then
  return 0
end
redis.call('DEL', KEYS[1])
for i = 3, #ARGV do
  -- A hint: a user who may not publish must not hear that nothing was done.
  redis.pcall(ARGV[1], ARGV[i], ARGV[2])
end
return 1
