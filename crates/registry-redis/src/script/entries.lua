-- The record of several claims: a string `+;ENTRY;ENTRY;`. These fields of an entry have a fixed
-- width. In an entry that begins at position e, they begin at:
-- - e: the claim
-- - e + 32: the mode, in lower case if the claim is granted
-- - e + 33: the end of the lease in us
-- - e + 81: the token
-- - e + 100: the token block

-- Returns the time in us, with 16 digits as in an entry.
local function now_text()
  local time = redis.call('TIME')
  return string.format('%010d%06d', time[1], time[2])
end

-- Returns the position of the claim's entry.
local function entry_of(record, claim)
  local separator = string.find(record, ';' .. claim, 1, true)
  return separator and separator + 1
end

-- Returns the end of the lease of an entry, or nil if the entry waits or its lease is over.
local function live_until(record, entry, now)
  local lease_end = string.sub(record, entry + 33, entry + 48)
  if string.find(record, '^%l', entry + 32) and lease_end > now then
    return lease_end
  end
end
