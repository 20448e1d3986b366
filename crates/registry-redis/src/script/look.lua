-- KEYS: locks, each with its newest tokens. Answers the time in us and, for each lock, its record, the lease left in ms and its token
-- if that is known; an empty record if it is free.
local time = redis.call('TIME')
local answers = {string.format('%.0f', time[1] * 1000000 + time[2])}
for i = 1, #KEYS, 2 do
  local is_read, held, record = pcall(holder, KEYS[i])
  if not is_read and not is_foreign(held) then
    return {err = failure_text(held)}
  end
  if not is_read or record == '' then
    -- A value of another type, or an empty one, was written by another program; acquiring reports the key as taken, too.
    record = '?'
  end
  answers[#answers + 1] = record and string.sub(record, 1, 2048) or ''
  answers[#answers + 1] = redis.call('PTTL', KEYS[i])
  local has_token, token = pcall(first_token, record or '', KEYS[i + 1])
  if not has_token and not is_foreign(token) then
    return {err = failure_text(token)}
  end
  answers[#answers + 1] = record and has_token and token or ''
end
return answers
