-- KEYS: the lock, its token key. ARGV: claim, number of used tokens, publish command, message,
-- channels. Removes the claim's grant or its place in the queue. Returns 0 if it has neither.
-- Otherwise returns 1 if the claim held the lock, else 0, plus 2 if other claims remain.
local current_claim, record = read_holder(KEYS[1])
local first_token, last_reserved, remaining_record, freed
if record and has_several_claims(record) then
  local entry = entry_of(record, ARGV[1])
  if not entry then
    return 0
  end
  freed = live_until(record, entry, now_text()) and 1 or 0
  first_token = string.sub(record, entry + 81, entry + 99)
  last_reserved = first_token + string.sub(record, entry + 100, entry + 109) - 1
  remaining_record = string.sub(record, 1, entry - 1) .. string.sub(record, string.find(record, ';', entry, true) + 1)
elseif current_claim == ARGV[1] then
  first_token = read_first_token(record, KEYS[2])
  freed = 1
else
  return 0
end
-- The next grant reuses unused tokens that the clock has not passed. Otherwise tokens would run
-- ahead of the clock, and decrease after the server loses its data. Tokens of a provisional grant,
-- with a leading zero, are not reused. In a record of several claims, only the newest reserved
-- tokens are reused.
local is_final = first_token and (last_reserved or string.sub(first_token, 1, 1) ~= '0')
local newest_token = is_final and tonumber(string.match(redis.call('GETEX', KEYS[2]) or '', '^%d+'))
if newest_token and (not last_reserved or last_reserved == newest_token) then
  local time = redis.call('TIME')
  local last_used = tonumber(first_token) + ARGV[2] - 1
  if newest_token > last_used and newest_token >= time[1] * 1000000 + time[2] then
    -- With pcall, a server that refuses this write for lack of memory still releases the lock.
    redis.pcall('SET', KEYS[2], format_tokens(string.format('%.0f', last_used), first_token, ARGV[1]), 'KEEPTTL')
  end
end
local others_remain = remaining_record and remaining_record ~= '+;'
if others_remain then
  redis.call('SET', KEYS[1], remaining_record, 'KEEPTTL')
else
  redis.call('DEL', KEYS[1])
end
-- With pcall, the release succeeds even if the user may not publish.
for i = 5, #ARGV do
  redis.pcall(ARGV[3], ARGV[i], ARGV[4])
end
return others_remain and freed + 2 or freed
