-- KEYS: the lock, its token key. ARGV: claim, number of used tokens, publish command, message,
-- channels. Returns 1 if the claim held the lock, otherwise 0.
local held, record = holder(KEYS[1])
if held ~= ARGV[1] then
  return 0
end
-- Unused tokens that the clock has not passed are granted again. Otherwise tokens would run ahead
-- of the clock, and decrease after the server loses its data. A provisional token, with a leading
-- zero, is not compared.
local first = first_token(record, KEYS[2])
local newest = first and string.sub(first, 1, 1) ~= '0' and tonumber(string.match(redis.call('GETEX', KEYS[2]) or '', '^%d+'))
if newest then
  local time = redis.call('TIME')
  local used = tonumber(first) + ARGV[2] - 1
  if newest > used and newest >= time[1] * 1000000 + time[2] then
    -- A server that refuses this write for lack of memory must still free the lock.
    redis.pcall('SET', KEYS[2], token_value(string.format('%.0f', used), first, ARGV[1]), 'KEEPTTL')
  end
end
redis.call('DEL', KEYS[1])
-- The release succeeds even if this user may not publish.
for i = 5, #ARGV do
  redis.pcall(ARGV[3], ARGV[i], ARGV[4])
end
return 1
