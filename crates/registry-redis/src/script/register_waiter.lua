-- KEYS: the waiting claims of a lock. ARGV: claim, us that it has waited, lease in ms, mode, label.
-- A waiting claim is a field of a hash: the time at which the wait began, the time until which the
-- field has a meaning, the mode, a line break, and the label. Both times have 16 digits, in us.
local call, now = redis.call, now_text()
local ends = string.format('%016.0f', now + ARGV[3] * 1000)
local record = string.format('%016.0f', now - ARGV[2]) .. ends .. ARGV[4] .. '\n' .. ARGV[5]
call('HSET', KEYS[1], ARGV[1], record)
call('PEXPIRE', KEYS[1], math.max(call('PTTL', KEYS[1]), tonumber(ARGV[3])))
-- Processes that have ended leave their fields. One in 256 registrations deletes them.
if string.sub(ARGV[1], 1, 2) == '00' then
  local fields = call('HGETALL', KEYS[1])
  for i = 1, #fields, 2 do
    if string.sub(fields[i + 1], 17, 32) <= now then
      call('HDEL', KEYS[1], fields[i])
    end
  end
end
return 1
