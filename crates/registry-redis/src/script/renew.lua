-- KEYS: locks. ARGV: for each its claim and its lease in ms.
-- Answers for each the lease left in ms, as far as it was asked for; -1 if the claim holds nothing.
local answers = {}
-- A server that was asked to tell of changes notes all KEYS at each read of any of them. So there is one read, the last command; what
-- comes before it only writes. GT and NX came with version 7, which is the first to tell its number here.
local modern = redis.REDIS_VERSION_NUM
local call = redis.call
for i, lock in ipairs(KEYS) do
  -- As text, because that is what it is sent as.
  local claim, lease = ARGV[2 * i - 1], ARGV[2 * i]
  -- A key of another kind is somebody else's and says nothing of the others.
  local well, held = pcall(holder, lock)
  if well and held == claim then
    if modern then
      -- Longer, never shorter; and with an end, if somebody has taken it away.
      if call('PEXPIRE', lock, lease, 'GT') == 0 then
        call('PEXPIRE', lock, lease, 'NX')
      end
    elseif call('PTTL', lock) < tonumber(lease) then
      call('PEXPIRE', lock, lease)
    end
    answers[i] = tonumber(lease)
  else
    answers[i] = -1
  end
end
call('PTTL', KEYS[1])
return answers
