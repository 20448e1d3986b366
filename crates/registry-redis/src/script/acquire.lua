-- KEYS: the lock, its token key. ARGV: claim, lease in ms, number of tokens, retention of the token
-- key in ms, label, and in a quorum the round. Returns one of:
-- - granted: {1, first token, remaining lease in ms}
-- - busy: {0, remaining lease in ms, record, time in us, the holder's first token if known}
-- - not decided here: {2, record of several claims, remaining time of the key in ms, time in us}
local call, claim, round = redis.call, ARGV[1], ARGV[6]
local current_claim, record = read_holder(KEYS[1])
local now = now_text()
if current_claim then
  local remaining = call('PTTL', KEYS[1])
  if has_several_claims(record) then
    return {2, record, remaining, now}
  end
  if current_claim ~= claim then
    -- Only a value of another program can be longer than 2048 bytes.
    return {0, remaining, string.sub(record, 1, 2048), now, read_first_token(record, KEYS[2]) or ''}
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
local first_token, failure = reserve_tokens(KEYS[2], now, ARGV[3], ARGV[4], claim)
if failure then
  return failure
end
if round then
  -- The leading zero marks a provisional token.
  first_token = '0' .. first_token
end
store_holder(KEYS[1], claim, ARGV[2], round and first_token .. '.' .. round or first_token, now, ARGV[5])
return {1, first_token, tonumber(ARGV[2])}
