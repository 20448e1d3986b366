-- KEYS: locks. ARGV: for each its claim and its lease in ms.
-- Answers for each the lease left in ms, as far as it was asked for; -1 if the claim holds nothing.
local answers = {}
-- GT and NX came with version 7, which is the first to tell its number here.
local modern = redis.REDIS_VERSION_NUM
-- What a server that was asked to tell of changes notes at a read: the key that is read, from version 7.2 on and in any Valkey; before that
-- all KEYS, so that one read, the last command, is enough, and many would be dear. A key is read after it was written to.
local notes_one = modern and modern >= 0x70200
local call = redis.call
for i, lock in ipairs(KEYS) do
  -- As text, because that is what it is sent as.
  local claim, lease = ARGV[2 * i - 1], ARGV[2 * i]
  -- A value of another type belongs to another program and says nothing of the other locks.
  local is_read, held = pcall(holder, lock)
  if not is_read and not is_foreign(held) then
    return {err = failure_text(held)}
  end
  if is_read and held == claim then
    if modern then
      -- Longer, never shorter; and with an end, if somebody has taken it away.
      if call('PEXPIRE', lock, lease, 'GT') == 0 then
        call('PEXPIRE', lock, lease, 'NX')
      end
    elseif call('PTTL', lock) < tonumber(lease) then
      call('PEXPIRE', lock, lease)
    end
    if notes_one then
      call('PTTL', lock)
    end
    answers[i] = tonumber(lease)
  else
    answers[i] = -1
  end
end
if not notes_one then
  call('PTTL', KEYS[1])
end
return answers
