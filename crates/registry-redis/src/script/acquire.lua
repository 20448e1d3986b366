-- KEYS: the lock, its token key. ARGV: claim, lease in ms, number of tokens, retention of the token
-- key in ms, label, and in a quorum the round. Returns {1, first token, remaining lease in ms}, or
-- {0, remaining lease in ms, the holder's record, time in us, the holder's first token if known}.
local call, claim, round = redis.call, ARGV[1], ARGV[6]
local current_claim, record = read_holder(KEYS[1])
local time = call('TIME')
-- The time in us. The script builds it as text, because the record stores text.
local now_text = time[1] .. string.sub('00000', #time[2]) .. time[2]
if current_claim then
  local remaining = call('PTTL', KEYS[1])
  if current_claim ~= claim then
    -- Only a value of another program can be longer than 2048 bytes.
    return {0, remaining, string.sub(record, 1, 2048), now_text, read_first_token(record, KEYS[2]) or ''}
  end
  if remaining > 0 then
    -- PEXPIRE changes nothing here. It counts as a write, so WAIT and WAITAOF cover the grant.
    call('PEXPIRE', KEYS[1], remaining)
    if round then
      set_round(KEYS[1], record, round)
    end
  end
  local token = read_first_token(record, KEYS[2])
  if token then
    return {1, token, remaining}
  end
  return redis.error_reply('ERR the token of this grant is not stored any more; raise token_memory')
end
-- The first token must exceed all earlier tokens, even tokens that a server lost with its data. The
-- clock is usually ahead of earlier tokens, so the script first stores the clock's time as token.
-- SET returns the previous value.
local first_token, now, token_count = now_text, tonumber(now_text), tonumber(ARGV[3])
local previous = call('SET', KEYS[2], format_tokens(string.format('%.0f', now + token_count - 1), first_token, claim), 'PX', ARGV[4], 'GET')
local newest_token = previous and tonumber(string.match(previous, '^%d+'))
if newest_token and newest_token >= now then
  local last_token = newest_token + token_count
  if last_token >= 9007199254740992 then
    call('SET', KEYS[2], previous)
    return redis.error_reply('ERR the fencing token of this lock is too large to be increased; delete the key ' .. KEYS[2])
  end
  first_token = string.format('%.0f', newest_token + 1)
  -- The token key must not expire before the clock has passed the last token.
  local retention = ARGV[4] + math.ceil((last_token - now) / 1000)
  call('SET', KEYS[2], format_tokens(string.format('%.0f', last_token), first_token, claim), 'PX', string.format('%.0f', retention))
end
if round then
  first_token = '0' .. first_token
end
store_holder(KEYS[1], claim, ARGV[2], round and first_token .. '.' .. round or first_token, now_text, ARGV[5])
return {1, first_token, tonumber(ARGV[2])}
