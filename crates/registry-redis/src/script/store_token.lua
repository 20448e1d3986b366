-- KEYS: the lock, its token key. ARGV: claim, round, first token, last token, retention of the
-- token key in ms. Stores the token that a majority has agreed on. Returns 1, or 0 if the claim's
-- grant is not of this round.
local current_claim, record = read_holder(KEYS[1])
if current_claim ~= ARGV[1] or string.match(record, '^%x+ %d+%.(%x+) ') ~= ARGV[2] then
  return 0
end
local newest_token = string.match(redis.call('GETEX', KEYS[2]) or '', '^%d+') or '-1'
if tonumber(newest_token) < tonumber(ARGV[4]) then
  local time = redis.call('TIME')
  local ahead_of_clock_ms = tonumber(ARGV[4]) / 1000 - time[1] * 1000
  redis.call('SET', KEYS[2], ARGV[4], 'PX', string.format('%.0f', tonumber(ARGV[5]) + math.max(0, math.ceil(ahead_of_clock_ms))))
end
redis.call('SET', KEYS[1], string.gsub(record, '^(%x+) %d+', '%1 ' .. ARGV[3], 1), 'KEEPTTL')
return 1
