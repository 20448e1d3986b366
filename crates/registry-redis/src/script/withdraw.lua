-- KEYS: the lock. ARGV: claim, attempt, publish command, message, channels. Returns 1 if this
-- attempt held the lock, otherwise 0.
local held, record = holder(KEYS[1])
if held ~= ARGV[1] or string.match(record, '^%x+ %d+%.(%x+) ') ~= ARGV[2] then
  return 0
end
redis.call('DEL', KEYS[1])
for i = 5, #ARGV do
  -- The withdrawal succeeds even if this user may not publish.
  redis.pcall(ARGV[3], ARGV[i], ARGV[4])
end
return 1
