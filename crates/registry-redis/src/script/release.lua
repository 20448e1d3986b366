-- KEYS: the lock, its token key. ARGV: claim, number of used tokens, publish command, message,
-- channels. Returns 1 if the claim held the lock, otherwise 0.
local held, record = holder(KEYS[1])
local first, reserved, rest, freed
if record and is_several(record) then
  local entry = entry_of(record, ARGV[1])
  if not entry then
    return 0
  end
  freed = live_until(record, entry, now_text()) and 1 or 0
  first = string.sub(record, entry + 81, entry + 99)
  reserved = first + string.sub(record, entry + 100, entry + 109) - 1
  rest = string.sub(record, 1, entry - 1) .. string.sub(record, string.find(record, ';', entry, true) + 1)
elseif held == ARGV[1] then
  first = first_token(record, KEYS[2])
  freed = 1
else
  return 0
end
-- Unused tokens that the clock has not passed are granted again. Otherwise tokens would run ahead
-- of the clock, and decrease after the server loses its data. A provisional token, with a leading
-- zero, is not compared. Beside other claims, only the last reserved tokens can be returned.
local is_final = first and (reserved or string.sub(first, 1, 1) ~= '0')
local newest = is_final and tonumber(string.match(redis.call('GETEX', KEYS[2]) or '', '^%d+'))
if newest and (not reserved or reserved == newest) then
  local time = redis.call('TIME')
  local used = tonumber(first) + ARGV[2] - 1
  if newest > used and newest >= time[1] * 1000000 + time[2] then
    -- A server that refuses this write for lack of memory must still free the lock.
    redis.pcall('SET', KEYS[2], token_value(string.format('%.0f', used), first, ARGV[1]), 'KEEPTTL')
  end
end
if rest and rest ~= '+;' then
  redis.call('SET', KEYS[1], rest, 'KEEPTTL')
else
  redis.call('DEL', KEYS[1])
end
-- The release succeeds even if this user may not publish.
for i = 5, #ARGV do
  redis.pcall(ARGV[3], ARGV[i], ARGV[4])
end
return freed
