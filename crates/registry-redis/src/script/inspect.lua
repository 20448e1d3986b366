-- KEYS: locks, each followed by its token key. Returns the server's time in us. For each lock it
-- then returns the record, the remaining lease in ms, and the token if known. The record of a free
-- lock is empty.
local time = redis.call('TIME')
local answers = {string.format('%.0f', time[1] * 1000000 + time[2])}
for i = 1, #KEYS, 2 do
  local is_read, claim_or_failure, record = pcall(read_holder, KEYS[i])
  if not is_read and not is_wrong_type(claim_or_failure) then
    return {err = failure_text(claim_or_failure)}
  end
  if not is_read or record == '' then
    -- Another program wrote a value of another type or an empty value. `acquire` fails for such a
    -- type, and reports an empty value as held.
    record = '?'
  end
  if record and not has_several_claims(record) then
    record = string.sub(record, 1, 2048)
  end
  answers[#answers + 1] = record or ''
  answers[#answers + 1] = redis.call('PTTL', KEYS[i])
  local has_token, token_or_failure = pcall(read_first_token, record or '', KEYS[i + 1])
  if not has_token and not is_wrong_type(token_or_failure) then
    return {err = failure_text(token_or_failure)}
  end
  answers[#answers + 1] = record and has_token and token_or_failure or ''
end
return answers
