-- KEYS: locks. ARGV: for each its claim, how to publish, message, channels. Answers for each 1 if the claim held it, 0 if not, or
-- {2, what went wrong}.
local function release(lock, claim, publish, message, ...)
  if holder(lock) ~= claim then
    return 0
  end
  redis.call('DEL', lock)
  for _, channel in ipairs({...}) do
    -- A hint: a user who may not publish must not hear that nothing was done.
    redis.pcall(publish, channel, message)
  end
  return 1
end

local answers, each = {}, #ARGV / #KEYS
for i, lock in ipairs(KEYS) do
  -- A key of another kind is somebody else's and says nothing of the others.
  local well, answer = pcall(release, lock, unpack(ARGV, each * (i - 1) + 1, each * i))
  answers[i] = well and answer or {2, type(answer) == 'table' and answer.err or answer}
end
return answers
