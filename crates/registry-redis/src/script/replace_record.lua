-- KEYS: the lock. ARGV:
-- - the expected value
-- - the new value, empty if the key becomes free
-- - the expiry of the new value in ms
-- - the latest expected end of an exclusive grant in us: 0 if its key has no expiry, empty for any
--   other value, -1 to read without writing
-- - the publish command, the message and the channels, if other claims may be granted after the
--   change
-- Returns {1}, or {2, the value, the remaining time of the key in ms, time in us} if the value or
-- the end has changed.
local value = redis.call('GETEX', KEYS[1]) or ''
local remaining, now = redis.call('PTTL', KEYS[1]), now_text()
local is_expected = value == ARGV[1]
if is_expected and ARGV[4] ~= '' then
  -- A renewal of an exclusive grant changes only the expiry.
  local lease_end = remaining < 0 and 0 or tonumber(now) + remaining * 1000
  is_expected = lease_end <= tonumber(ARGV[4]) and (lease_end > 0 or ARGV[4] == '0')
end
if not is_expected then
  return {2, value, remaining, now}
end
if ARGV[2] == '' then
  redis.call('DEL', KEYS[1])
else
  redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
end
-- With pcall, the change succeeds even if the user may not publish.
for i = 7, #ARGV do
  redis.pcall(ARGV[5], ARGV[i], ARGV[6])
end
return {1}
