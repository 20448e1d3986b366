-- KEYS: locks. Answers the time in us and, for each lock, its record and the lease left in ms; an empty record if it is free.
local time = redis.call('TIME')
local answers = {string.format('%.0f', time[1] * 1000000 + time[2])}
for _, lock in ipairs(KEYS) do
  local held = redis.pcall('GET', lock)
  answers[#answers + 1] = type(held) == 'string' and held or ''
  answers[#answers + 1] = redis.call('PTTL', lock)
end
return answers
