-- KEYS: locks. Answers the time in us and, for each lock, its record and the lease left in ms; an empty record if it is free.
local time = redis.call('TIME')
local answers = {string.format('%.0f', time[1] * 1000000 + time[2])}
for _, lock in ipairs(KEYS) do
  local well, held, record = pcall(holder, lock)
  if not well or record == '' then
    -- What is of another kind, or empty, is a stranger's and taken all the same.
    record = '?'
  end
  answers[#answers + 1] = record and string.sub(record, 1, 2048) or ''
  answers[#answers + 1] = redis.call('PTTL', lock)
end
return answers
