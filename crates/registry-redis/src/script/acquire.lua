-- KEYS: the lock, its newest tokens. ARGV: claim, lease in ms, how many tokens, memory of tokens in ms, label, and in a quorum the attempt.
-- Answers {1, token, lease left in ms} or {0, lease left in ms, the holder's record, time in us, its token if that is known}.
local claim, attempt = ARGV[1], ARGV[6]
local held, record = holder(KEYS[1])
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
if held then
  local left = redis.call('PTTL', KEYS[1])
  if held ~= claim then
    -- Longer than any record of ours; a stranger's value may be of any length.
    return {0, left, string.sub(record, 1, 2048), string.format('%.0f', now), first_token(record, KEYS[2]) or ''}
  end
  if left > 0 then
    -- Changes nothing, but is a write, which replicas can be waited for.
    redis.call('PEXPIRE', KEYS[1], left)
    if attempt then
      restamp(KEYS[1], record, attempt)
    end
    redis.call('PTTL', KEYS[1])
  end
  local token = first_token(record, KEYS[2])
  if token then
    return {1, token, left}
  end
  return redis.error_reply('ERR the token of this grant is not remembered any more; is token_memory shorter than the lease?')
end
-- Larger than all before, and than all that a server that has lost its data may have forgotten.
local newest = string.match(redis.call('GETEX', KEYS[2]) or '', '^%d+')
local token = newest and math.max(tonumber(newest) + 1, now) or now
local last = token + tonumber(ARGV[3]) - 1
if last >= 9007199254740992 then
  return redis.error_reply('ERR the fencing token of this lock is too large to count on; delete the key ' .. KEYS[2])
end
-- Where tokens are ahead of the clock, they must be remembered until it has caught up.
local kept = tonumber(ARGV[4]) + math.ceil((last - now) / 1000)
local first, since = string.format('%.0f', token), string.format('%.0f', now)
redis.call('SET', KEYS[2], memory(string.format('%.0f', last), first, claim), 'PX', kept)
if attempt then
  first = '0' .. first
end
put(KEYS[1], claim, ARGV[2], attempt and first .. '.' .. attempt or first, since, ARGV[5])
-- A read after the last write: of the next change by somebody else the server tells, if it was asked to.
redis.call('PTTL', KEYS[1])
return {1, first, tonumber(ARGV[2])}
