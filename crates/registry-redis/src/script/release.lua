-- KEYS: the lock. ARGV: claim. Answers 1 if it held the lock.
local held = redis.call('GET', KEYS[1])
if held and string.sub(held, 1, 32) == ARGV[1] then
  redis.call('DEL', KEYS[1])
  -- A hint: a user who may not publish must not hear that nothing was done.
  redis.pcall('PUBLISH', KEYS[1], '0')
  return 1
end
return 0
