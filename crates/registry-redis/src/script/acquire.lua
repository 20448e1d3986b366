-- KEYS: locks, each with its newest tokens. ARGV: for each its claim, lease in ms, how many tokens, memory of tokens in ms, label, and
-- in a quorum the attempt. Answers for each {1, token, lease left in ms}, {0, lease left in ms, the holder's record, time in us, its
-- token if that is known}, or {2, what went wrong}.
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local now_text = string.format('%.0f', now)

local function acquire(lock, tokens, claim, lease, block, kept, label, attempt)
  local held, record = holder(lock)
  if held then
    local left = redis.call('PTTL', lock)
    if held ~= claim then
      -- Longer than any record of ours; a stranger's value may be of any length.
      return {0, left, string.sub(record, 1, 2048), now_text, first_token(record, tokens) or ''}
    end
    if left > 0 then
      -- Changes nothing, but is a write, which replicas can be waited for.
      redis.call('PEXPIRE', lock, left)
      if attempt ~= '' then
        restamp(lock, record, attempt)
      end
      redis.call('PTTL', lock)
    end
    local token = first_token(record, tokens)
    if token then
      return {1, token, left}
    end
    return {2, 'ERR the token of this grant is not remembered any more; is token_memory shorter than the lease?'}
  end
  -- Larger than all before, and than all that a server that has lost its data may have forgotten.
  local newest = string.match(redis.call('GET', tokens) or '', '^%d+')
  local token = now
  if newest then
    token = math.max(tonumber(newest) + 1, now)
  end
  local last = token + tonumber(block) - 1
  if last >= 9007199254740992 then
    return {2, 'ERR the fencing token of this lock is too large to count on; delete the key ' .. tokens}
  end
  if token ~= now then
    -- Where tokens are ahead of the clock, they must be remembered until it has caught up.
    kept = string.format('%.0f', tonumber(kept) + math.ceil((last - now) / 1000))
  end
  local first = token == now and now_text or string.format('%.0f', token)
  redis.call('SET', tokens, memory(string.format('%.0f', last), first, claim), 'PX', kept)
  if attempt ~= '' then
    first = '0' .. first
    put(lock, claim, lease, first .. '.' .. attempt, now_text, label)
  else
    put(lock, claim, lease, first, now_text, label)
  end
  -- A read after the last write: of the next change by somebody else the server tells, if it was asked to.
  redis.call('PTTL', lock)
  return {1, first, tonumber(lease)}
end

local answers = {}
for i = 1, #KEYS / 2 do
  -- A key of another kind is somebody else's and says nothing of the others.
  local well, answer = pcall(acquire, KEYS[2 * i - 1], KEYS[2 * i], unpack(ARGV, 6 * i - 5, 6 * i))
  answers[i] = well and answer or {2, type(answer) == 'table' and answer.err or answer}
end
return answers
