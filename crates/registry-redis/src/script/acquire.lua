-- KEYS: the lock, its newest token. ARGV: claim, lease in ms, how many tokens, memory of tokens in ms, label.
-- Answers {1, token, lease left in ms} or {0, lease left in ms, the holder's record, time in us}.
local held = redis.call('GET', KEYS[1])
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
if held then
  local left = redis.call('PTTL', KEYS[1])
  if string.sub(held, 1, 32) == ARGV[1] then
    return {1, string.match(held, '^%x+ (%d+) '), left}
  end
  -- Longer than any record of ours; a stranger's value may be of any length.
  return {0, left, string.sub(held, 1, 2048), string.format('%.0f', now)}
end
-- Larger than all before, and than all that a server that has lost its data may have forgotten.
local token = math.max(tonumber(redis.call('GET', KEYS[2]) or '-1') + 1, now)
local last = token + tonumber(ARGV[3]) - 1
if last >= 9007199254740992 then
  return redis.error_reply('ERR the fencing token of this lock is too large to count on; delete the key ' .. KEYS[2])
end
-- Where tokens are ahead of the clock, they must be remembered until it has caught up.
local memory = tonumber(ARGV[4]) + math.ceil((last - now) / 1000)
redis.call('SET', KEYS[2], string.format('%.0f', last), 'PX', string.format('%.0f', memory))
token = string.format('%.0f', token)
redis.call('SET', KEYS[1], ARGV[1] .. ' ' .. token .. ' ' .. string.format('%.0f', now) .. ' ' .. ARGV[5], 'PX', ARGV[2])
return {1, token, tonumber(ARGV[2])}
