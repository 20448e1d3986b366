-- KEYS: the waiting claims of a lock. ARGV: claim.
return redis.call('HDEL', KEYS[1], ARGV[1])
