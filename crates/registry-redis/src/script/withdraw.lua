-- KEYS: the lock. ARGV: claim, round, publish command, message, channels. Returns 1 if the claim's
-- grant was of this round, otherwise 0.
local current_claim, record = read_holder(KEYS[1])
if current_claim ~= ARGV[1] or string.match(record, '^%x+ %d+%.(%x+) ') ~= ARGV[2] then
  return 0
end
redis.call('DEL', KEYS[1])
for i = 5, #ARGV do
  -- With pcall, the withdrawal succeeds even if the user may not publish.
  redis.pcall(ARGV[3], ARGV[i], ARGV[4])
end
return 1
