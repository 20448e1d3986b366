-- Reserves `block` tokens for `claim` in the token key. `since` is the time in us, as text. Returns
-- the first token as text, or nil and an error. The token must exceed all earlier tokens, even those
-- that a server lost with its data. Usually the clock is ahead of them, so the clock's time is stored
-- first. SET returns the previous value.
local function reserve_tokens(tokens, since, block, memory, claim)
  local call, now = redis.call, tonumber(since)
  block = tonumber(block)
  local before = call('SET', tokens, token_value(string.format('%.0f', now + block - 1), since, claim), 'PX', memory, 'GET')
  local newest = before and tonumber(string.match(before, '^%d+'))
  if not newest or newest < now then
    return since
  end
  local last = newest + block
  if last >= 9007199254740992 then
    call('SET', tokens, before)
    return nil, redis.error_reply('ERR the fencing token of this lock is too large to be increased; delete the key ' .. tokens)
  end
  local first = string.format('%.0f', newest + 1)
  -- Keeps the token key until the clock has passed the last token.
  local ttl = memory + math.ceil((last - now) / 1000)
  call('SET', tokens, token_value(string.format('%.0f', last), first, claim), 'PX', string.format('%.0f', ttl))
  return first
end
