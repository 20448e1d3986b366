-- KEYS: the lock. Answers 1 if somebody held it.
if redis.call('GET', KEYS[1]) then
  redis.call('DEL', KEYS[1])
  -- A hint: a user who may not publish must not hear that nothing was done.
  redis.pcall('PUBLISH', KEYS[1], '0')
  return 1
end
return 0
