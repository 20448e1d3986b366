-- Adds a grant to the record of several claims. KEYS: the lock, its token key. ARGV:
-- - the expected value
-- - the text before the new entry
-- - the first fields of the new entry
-- - the last fields of the new entry
-- - the text after the new entry
-- - the lease in ms
-- - the number of tokens
-- - the retention of the token key in ms
-- - the latest end of the other entries in us
-- - the time of the grant that the new one converts in us, empty for any other grant
-- - the publish command, the message and the channels, if other claims may be granted after this
--   grant
-- Returns {1, token, lease in ms}, or {2, the value, the remaining time of the key in ms, time in
-- us} if the value has changed.
local value = redis.call('GETEX', KEYS[1]) or ''
local now = now_text()
if value ~= ARGV[1] then
  return {2, value, redis.call('PTTL', KEYS[1]), now}
end
local first_token, failure = reserve_tokens(KEYS[2], now, ARGV[7], ARGV[8], string.sub(ARGV[3], 1, 32))
if failure then
  return failure
end
local lease_end = string.format('%016.0f', now + ARGV[6] * 1000)
local token = string.rep('0', 19 - #first_token) .. first_token
local since = ARGV[10] ~= '' and ARGV[10] or now
local record = '+;' .. ARGV[2] .. ARGV[3] .. lease_end .. since .. '0000000000000000' .. token .. ARGV[4] .. ARGV[5]
local ttl = math.max(tonumber(ARGV[6]), math.ceil((ARGV[9] - now) / 1000)) + 1
redis.call('SET', KEYS[1], record, 'PX', string.format('%.0f', ttl))
-- With pcall, the grant succeeds even if the user may not publish.
for i = 13, #ARGV do
  redis.pcall(ARGV[11], ARGV[i], ARGV[12])
end
return {1, first_token, tonumber(ARGV[6])}
