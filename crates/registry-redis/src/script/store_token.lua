-- KEYS: the lock, its token key. ARGV: claim, attempt, first token, last token, token memory in ms.
-- Stores the token that a majority has agreed on. Returns 1, or 0 if the attempt does not hold the
-- lock.
local held, record = holder(KEYS[1])
if held ~= ARGV[1] or string.match(record, '^%x+ %d+%.(%x+) ') ~= ARGV[2] then
  return 0
end
local newest = string.match(redis.call('GETEX', KEYS[2]) or '', '^%d+') or '-1'
if tonumber(newest) < tonumber(ARGV[4]) then
  local time = redis.call('TIME')
  local ahead = tonumber(ARGV[4]) / 1000 - time[1] * 1000
  redis.call('SET', KEYS[2], ARGV[4], 'PX', string.format('%.0f', tonumber(ARGV[5]) + math.max(0, math.ceil(ahead))))
end
redis.call('SET', KEYS[1], string.gsub(record, '^(%x+) %d+', '%1 ' .. ARGV[3], 1), 'KEEPTTL')
return 1
