-- A lock is a string, `CLAIM TOKEN SINCE LABEL`. In a quorum, the token is followed by a dot and
-- the attempt that wrote it. A leading zero marks a provisional token, on which no majority has
-- agreed yet.

-- A key that several claims hold, or for which claims wait, is `+;` and the entries.
local function is_several(record)
  return string.sub(record, 1, 2) == '+;'
end

-- Returns the claim and the record. Redis treats GETEX as a write, so this read does not enable
-- tracking.
local function holder(lock)
  local record = redis.call('GETEX', lock)
  if record then
    return string.sub(record, 1, 32), record
  end
end

-- Stores `claim` as the holder.
local function store_holder(lock, claim, lease, token, now, label)
  redis.call('SET', lock, claim .. ' ' .. token .. ' ' .. now .. ' ' .. label, 'PX', lease)
end

-- Returns the value of the token key: the last token. The record contains everything else.
local function token_value(last)
  return last
end

-- Returns the first token of the claim that holds the lock.
local function first_token(record)
  return string.match(record, '^%x+ (%d+)')
end

-- Records that the grant belongs to a later attempt, so that the withdrawal of an earlier one does
-- not delete it.
local function reassign(lock, record, attempt)
  if attempt <= (string.match(record, '^%x+ %d+%.(%x+) ') or '') then
    -- The request of an earlier attempt arrived late.
    return
  end
  redis.call('SET', lock, string.gsub(record, '^(%x+ %d+)%S*', '%1.' .. attempt, 1), 'KEEPTTL')
end
