-- KEYS: locks, each with its newest tokens. Answers the time in us and, for each lock, its record, the lease left in ms and its token
-- if that is known; an empty record if it is free.
local time = redis.call('TIME')
local answers = {string.format('%.0f', time[1] * 1000000 + time[2])}
for i = 1, #KEYS, 2 do
  local well, held, record = pcall(holder, KEYS[i])
  if not well or record == '' then
    -- What is of another kind, or empty, is a stranger's and taken all the same.
    record = '?'
  end
  answers[#answers + 1] = record and string.sub(record, 1, 2048) or ''
  answers[#answers + 1] = redis.call('PTTL', KEYS[i])
  local told, token = pcall(first_token, record or '', KEYS[i + 1])
  answers[#answers + 1] = record and told and token or ''
end
return answers
