-- KEYS: locks. ARGV: for each its claim and its lease in ms.
-- Answers for each the lease left in ms; -1 if the claim holds nothing.
local answers = {}
for i, lock in ipairs(KEYS) do
  local claim, lease = ARGV[2 * i - 1], tonumber(ARGV[2 * i])
  -- A key of another kind is somebody else's and says nothing of the others.
  local well, held = pcall(holder, lock)
  if well and held == claim then
    local left = redis.call('PTTL', lock)
    if left < lease then
      redis.call('PEXPIRE', lock, lease)
      -- A read after the last write: of the next change by somebody else the server tells, if it was asked to.
      redis.call('PTTL', lock)
      left = lease
    end
    answers[i] = left
  else
    answers[i] = -1
  end
end
return answers
