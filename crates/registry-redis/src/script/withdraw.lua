-- KEYS: the lock. ARGV: claim, attempt, how to publish, message, channels. Answers 1 if the attempt held it.
local held, record = holder(KEYS[1])
if held ~= ARGV[1] or string.match(record, '^%x+ %d+%.(%x+) ') ~= ARGV[2] then
  return 0
end
redis.call('DEL', KEYS[1])
for i = 5, #ARGV do
  -- A hint: a user who may not publish must not hear that nothing was done.
  redis.pcall(ARGV[3], ARGV[i], ARGV[4])
end
return 1
