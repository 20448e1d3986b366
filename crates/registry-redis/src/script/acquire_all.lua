-- KEYS: locks, each followed by its token key. ARGV: lease in ms, number of tokens, retention of
-- the token keys in ms, label, then the claim of each lock. Returns one of:
-- - all claims hold their locks: 1, then the first token and the remaining lease in ms of each lock
-- - a lock is busy: the busy response of `acquire` for this lock, then its index from 0
-- - not decided here: {2}
-- In the last two cases, the script changes nothing.
local call, now = redis.call, now_text()
local answers, free = {1}, {}
for i = 1, #KEYS / 2 do
  local lock, token_key, claim = KEYS[2 * i - 1], KEYS[2 * i], ARGV[4 + i]
  local current_claim, record = read_holder(lock)
  if not current_claim then
    free[#free + 1] = i
  elseif has_several_claims(record) then
    return {2}
  elseif current_claim ~= claim then
    return {0, call('PTTL', lock), string.sub(record, 1, 2048), now, read_first_token(record, token_key) or '', i - 1}
  else
    local token = read_first_token(record, token_key)
    if not token then
      return {2}
    end
    answers[2 * i], answers[2 * i + 1] = token, call('PTTL', lock)
  end
end
local is_finished, failure = pcall(function()
  for _, i in ipairs(free) do
    local claim = ARGV[4 + i]
    local first_token, failure = reserve_tokens(KEYS[2 * i], now, ARGV[2], ARGV[3], claim)
    if failure then
      return failure
    end
    store_holder(KEYS[2 * i - 1], claim, ARGV[1], first_token, now, ARGV[4])
    answers[2 * i], answers[2 * i + 1] = first_token, tonumber(ARGV[1])
  end
end)
if not is_finished or failure then
  -- A failed command does not undo earlier writes of a script. All these locks were free before.
  for _, i in ipairs(free) do
    call('DEL', KEYS[2 * i - 1])
  end
  return is_finished and failure or {err = failure_text(failure)}
end
return answers
