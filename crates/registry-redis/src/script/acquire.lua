-- KEYS: the lock, its token key. ARGV: claim, lease in ms, number of tokens, token memory in ms,
-- label, and in a quorum the attempt. Returns {1, token, remaining lease in ms}, or {0, remaining
-- lease in ms, the holder's record, time in us, the holder's token if known}, or {2, the record of
-- several claims, the remaining time of the key in ms, time in us}.
local call, claim, attempt = redis.call, ARGV[1], ARGV[6]
local held, record = holder(KEYS[1])
local time = call('TIME')
-- The time in us. It is built as text because it is stored as text; a number would need formatting.
local since = time[1] .. string.sub('00000', #time[2]) .. time[2]
if held then
  local left = call('PTTL', KEYS[1])
  if is_several(record) then
    return {2, record, left, since}
  end
  if held ~= claim then
    -- Shortens only values of other programs, which may have any length.
    return {0, left, string.sub(record, 1, 2048), since, first_token(record, KEYS[2]) or ''}
  end
  if left > 0 then
    -- Changes nothing, but is a write, so WAIT and WAITAOF cover it.
    call('PEXPIRE', KEYS[1], left)
    if attempt then
      reassign(KEYS[1], record, attempt)
    end
  end
  local token = first_token(record, KEYS[2])
  if token then
    return {1, token, left}
  end
  return redis.error_reply('ERR the token of this grant is not stored any more; raise token_memory')
end
local first, failure = reserve_tokens(KEYS[2], since, ARGV[3], ARGV[4], claim)
if failure then
  return failure
end
if attempt then
  first = '0' .. first
end
store_holder(KEYS[1], claim, ARGV[2], attempt and first .. '.' .. attempt or first, since, ARGV[5])
return {1, first, tonumber(ARGV[2])}
