-- KEYS: the lock, its token key. ARGV: claim, number of used tokens, publish command, message,
-- channels. Returns 1 if the claim held the lock, otherwise 0.
local current_claim, record = read_holder(KEYS[1])
if current_claim ~= ARGV[1] then
  return 0
end
-- The next grant reuses unused tokens that the clock has not passed. Otherwise tokens would run
-- ahead of the clock, and decrease after the server loses its data. A provisional token, with a
-- leading zero, is not compared.
local first_token = read_first_token(record, KEYS[2])
local newest_token = first_token and string.sub(first_token, 1, 1) ~= '0' and tonumber(string.match(redis.call('GETEX', KEYS[2]) or '', '^%d+'))
if newest_token then
  local time = redis.call('TIME')
  local last_used = tonumber(first_token) + ARGV[2] - 1
  if newest_token > last_used and newest_token >= time[1] * 1000000 + time[2] then
    -- With pcall, a server that refuses this write for lack of memory still releases the lock.
    redis.pcall('SET', KEYS[2], format_tokens(string.format('%.0f', last_used), first_token, ARGV[1]), 'KEEPTTL')
  end
end
redis.call('DEL', KEYS[1])
-- With pcall, the release succeeds even if the user may not publish.
for i = 5, #ARGV do
  redis.pcall(ARGV[3], ARGV[i], ARGV[4])
end
return 1
