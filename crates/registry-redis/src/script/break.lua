-- KEYS: the lock. Answers 1 if somebody held it.
if redis.call('GET', KEYS[1]) then
  redis.call('DEL', KEYS[1])
  redis.call('PUBLISH', KEYS[1], '0')
  return 1
end
return 0
