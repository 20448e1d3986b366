-- KEYS: the lock, the key of its value block. ARGV: claim, token, bytes. Stores `TOKEN BYTES` and
-- returns 1 if the claim holds the lock exclusively and no larger token has written. Otherwise
-- returns 0.
local current_claim, record = read_holder(KEYS[1])
local is_held = current_claim == ARGV[1]
if record and has_several_claims(record) then
  local entry = entry_of(record, ARGV[1])
  is_held = entry and live_until(record, entry, now_text()) and string.sub(record, entry + 32, entry + 32) == 'x'
end
if not is_held then
  return 0
end
-- The comparison uses text, because a Lua number cannot represent every token exactly.
local newest, token = string.match(redis.call('GETEX', KEYS[2]) or '', '^%d+'), ARGV[2]
if newest and (#newest > #token or #newest == #token and newest > token) then
  return 0
end
redis.call('SET', KEYS[2], token .. ' ' .. ARGV[3])
return 1
