-- KEYS: locks. ARGV: for each its claim and its lease in ms.
-- Answers for each the lease left in ms; -1 if the claim holds nothing.
local answers = {}
for i, lock in ipairs(KEYS) do
  local claim, lease = ARGV[2 * i - 1], tonumber(ARGV[2 * i])
  -- A key that is no string is somebody else's and says nothing of the others.
  local held = redis.pcall('GET', lock)
  if type(held) == 'string' and string.sub(held, 1, 32) == claim then
    local left = redis.call('PTTL', lock)
    if left < lease then
      redis.call('PEXPIRE', lock, lease)
      left = lease
    end
    answers[i] = left
  else
    answers[i] = -1
  end
end
return answers
