-- KEYS: the lock, its newest tokens. ARGV: claim, how many tokens it has used, how to publish, message, channels.
-- Answers 1 if the claim held the lock, otherwise 0.
local held, record = holder(KEYS[1])
if held ~= ARGV[1] then
  return 0
end
-- Unused tokens are reserved again if the clock has not passed them. Otherwise tokens would outrun the clock, and go backwards once
-- the server has lost its data. A token with a zero in front is provisional and says nothing of the newest.
local first = first_token(record, KEYS[2])
local newest = first and string.sub(first, 1, 1) ~= '0' and tonumber(string.match(redis.call('GETEX', KEYS[2]) or '', '^%d+'))
if newest then
  local time = redis.call('TIME')
  local used = tonumber(first) + ARGV[2] - 1
  if newest > used and newest >= time[1] * 1000000 + time[2] then
    -- A server that refuses this, because its memory is full, still frees the lock.
    redis.pcall('SET', KEYS[2], memory(string.format('%.0f', used), first, ARGV[1]), 'KEEPTTL')
  end
end
redis.call('DEL', KEYS[1])
-- A hint: a user who may not publish must not hear that nothing was done.
for i = 5, #ARGV do
  redis.pcall(ARGV[3], ARGV[i], ARGV[4])
end
return 1
