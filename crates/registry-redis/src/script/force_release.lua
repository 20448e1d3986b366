-- KEYS: the lock. ARGV: publish command, message, channels. Returns 1 if the lock was held,
-- otherwise 0.
if not read_holder(KEYS[1]) then
  return 0
end
redis.call('DEL', KEYS[1])
for i = 3, #ARGV do
  -- With pcall, the release succeeds even if the user may not publish.
  redis.pcall(ARGV[1], ARGV[i], ARGV[2])
end
return 1
