-- KEYS: the lock. ARGV: publish command, message, channels. Ends all grants. Waiting claims keep
-- their entries. Returns 1 if the lock was held, otherwise 0.
local current_claim, record, is_foreign = read_holder(KEYS[1])
if not current_claim or is_foreign then
  return 0
end
local freed, waiting = 1, ''
if has_several_claims(record) then
  freed = 0
  local now = now_text()
  for entry in string.gmatch(string.sub(record, 3), '[^;]*;') do
    if string.find(entry, '^%u', 33) then
      waiting = waiting .. entry
    elseif live_until(entry, 1, now) then
      freed = 1
    end
  end
end
if waiting == '' then
  redis.call('DEL', KEYS[1])
else
  redis.call('SET', KEYS[1], '+;' .. waiting, 'KEEPTTL')
end
for i = 3, #ARGV do
  -- With pcall, the release succeeds even if the user may not publish.
  redis.pcall(ARGV[1], ARGV[i], ARGV[2])
end
return freed
