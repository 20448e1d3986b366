-- A lock is a string, `CLAIM TOKEN SINCE LABEL`. In a quorum the token is followed by a dot and the attempt that wrote it down, and begins with
-- a zero as long as no majority has settled on it.

-- Who holds `lock`: the claim, and all that is known. GETEX, because it reads without asking to be told of changes.
local function holder(lock)
  local record = redis.call('GETEX', lock)
  if record then
    return string.sub(record, 1, 32), record
  end
end

-- Makes `claim` the holder.
local function put(lock, claim, lease, token, now, label)
  redis.call('SET', lock, claim .. ' ' .. token .. ' ' .. now .. ' ' .. label, 'PX', lease)
end

-- What is remembered of the newest tokens of a lock: the last, and here no more, because the rest is in the record.
local function memory(last)
  return last
end

-- The first token of a claim that holds the lock.
local function first_token(record)
  return string.match(record, '^%x+ (%d+)')
end

-- Makes the grant that of a later attempt, so that one that was given up cannot end it.
local function restamp(lock, record, attempt)
  if attempt <= (string.match(record, '^%x+ %d+%.(%x+) ') or '') then
    -- An earlier one, which was on its way for longer.
    return
  end
  redis.call('SET', lock, string.gsub(record, '^(%x+ %d+)%S*', '%1.' .. attempt, 1), 'KEEPTTL')
end
