-- KEYS: locks. Answers the time in us and, for each lock, its record and the lease left in ms; an empty record if it is free.
local time = redis.call('TIME')
local answers = {string.format('%.0f', time[1] * 1000000 + time[2])}
for _, lock in ipairs(KEYS) do
  local held = redis.pcall('GET', lock)
  -- What is no string, or an empty one, is a stranger's and taken all the same.
  if type(held) == 'table' or held == '' then
    held = '?'
  end
  answers[#answers + 1] = held and string.sub(held, 1, 2048) or ''
  answers[#answers + 1] = redis.call('PTTL', lock)
end
return answers
