-- Reserves `count` tokens for `claim` in the token key. `clock_text` is the time in us. Returns the
-- first token as text, or nil and an error. The first token must exceed all earlier tokens, even
-- tokens that a server lost with its data. The clock is usually ahead of earlier tokens, so the
-- function first stores the last of the tokens that begin at the clock's time. SET returns the
-- previous value. If that value has reached the clock's time, the tokens begin after that value.
local function reserve_tokens(token_key, clock_text, count, retention, claim)
  local call, now = redis.call, tonumber(clock_text)
  count = tonumber(count)
  local previous = call('SET', token_key, format_tokens(string.format('%.0f', now + count - 1), clock_text, claim), 'PX', retention, 'GET')
  local newest_token = previous and tonumber(string.match(previous, '^%d+'))
  if not newest_token or newest_token < now then
    return clock_text
  end
  local last_token = newest_token + count
  if last_token >= 9007199254740992 then
    call('SET', token_key, previous)
    return nil, redis.error_reply('ERR the fencing token of this lock is too large to be increased; delete the key ' .. token_key)
  end
  local first_token = string.format('%.0f', newest_token + 1)
  -- The token key must not expire before the clock has passed the last token.
  retention = retention + math.ceil((last_token - now) / 1000)
  call('SET', token_key, format_tokens(string.format('%.0f', last_token), first_token, claim), 'PX', string.format('%.0f', retention))
  return first_token
end
