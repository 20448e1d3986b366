-- A lock is a string, `CLAIM TOKEN SINCE LABEL`. In a quorum, a dot and the round that wrote the
-- grant follow the token. A leading zero marks a provisional token, on which no majority has agreed
-- yet.

-- A key that several claims hold, or for which claims wait, is `+;` and the entries.
local function has_several_claims(record)
  return string.sub(record, 1, 2) == '+;'
end

-- Returns the claim and the record. Redis treats GETEX as a write, so this read does not enable
-- tracking.
local function read_holder(lock)
  local record = redis.call('GETEX', lock)
  if record then
    return string.sub(record, 1, 32), record
  end
end

-- Stores `claim` as the holder.
local function store_holder(lock, claim, lease, token, now, label)
  redis.call('SET', lock, claim .. ' ' .. token .. ' ' .. now .. ' ' .. label, 'PX', lease)
end

-- Returns the value of the token key: only the last token, because the record contains the first
-- token and the claim.
local function format_tokens(last_token)
  return last_token
end

-- Returns the first token of the claim that holds the lock.
local function read_first_token(record)
  return string.match(record, '^%x+ (%d+)')
end

-- Stores the round of the grant if it is later, so that the withdrawal of an earlier round does not
-- delete the grant.
local function set_round(lock, record, round)
  if round <= (string.match(record, '^%x+ %d+%.(%x+) ') or '') then
    -- The request of an earlier round arrived late.
    return
  end
  redis.call('SET', lock, string.gsub(record, '^(%x+ %d+)%S*', '%1.' .. round, 1), 'KEEPTTL')
end
