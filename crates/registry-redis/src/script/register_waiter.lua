-- KEYS: the waiting claims of a lock. ARGV: claim, time waited in us, lease in ms, mode, label.
-- A waiting claim is a field of a hash. Its value is the time at which the wait began, the time at
-- which the field expires, the mode, a line break, and the label. Both times have 16 digits, in us.
local call, now = redis.call, now_text()
local expires_at = string.format('%016.0f', now + ARGV[3] * 1000)
local record = string.format('%016.0f', now - ARGV[2]) .. expires_at .. ARGV[4] .. '\n' .. ARGV[5]
call('HSET', KEYS[1], ARGV[1], record)
call('PEXPIRE', KEYS[1], math.max(call('PTTL', KEYS[1]), tonumber(ARGV[3])))
-- A process that ends without unregistering leaves its fields. One in 256 registrations deletes all
-- expired fields.
if string.sub(ARGV[1], 1, 2) == '00' then
  local fields = call('HGETALL', KEYS[1])
  for i = 1, #fields, 2 do
    if string.sub(fields[i + 1], 17, 32) <= now then
      call('HDEL', KEYS[1], fields[i])
    end
  end
end
return 1
