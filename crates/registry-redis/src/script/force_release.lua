-- KEYS: the lock. ARGV: publish command, message, channels. Ends all grants; claims that wait also
-- lose their places. Returns 1 if the lock was held, otherwise 0.
local current_claim, record = read_holder(KEYS[1])
if not current_claim then
  return 0
end
local freed = 1
if is_several(record) then
  freed = 0
  local now, entry = now_text(), 3
  while entry < #record do
    if live_until(record, entry, now) then
      freed = 1
    end
    entry = string.find(record, ';', entry, true) + 1
  end
end
redis.call('DEL', KEYS[1])
for i = 3, #ARGV do
  -- With pcall, the release succeeds even if the user may not publish.
  redis.pcall(ARGV[1], ARGV[i], ARGV[2])
end
return freed
