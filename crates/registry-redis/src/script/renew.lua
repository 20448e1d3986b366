-- KEYS: locks. ARGV: the claim and the lease in ms of each lock. Returns the granted lease of each
-- lock in ms, or -1 if the claim does not hold the lock.
local answers = {}

-- Extends one entry of the record of several claims. Never shortens its lease.
local function renew_entry(lock, record, claim, lease)
  local entry, now = entry_of(record, claim), now_text()
  local lease_end = entry and live_until(record, entry, now)
  if not lease_end then
    return -1
  end
  local renewed = string.format('%016.0f', now + lease * 1000)
  if renewed > lease_end then
    redis.call('SET', lock, string.sub(record, 1, entry + 32) .. renewed .. string.sub(record, entry + 49), 'KEEPTTL')
  end
  -- A key whose expiry another client removed keeps no expiry: this lease may be shorter than those
  -- of other entries.
  local remaining = redis.call('PTTL', lock)
  if remaining >= 0 and remaining <= tonumber(lease) then
    redis.call('PEXPIRE', lock, lease + 1)
  end
  return tonumber(lease)
end

-- REDIS_VERSION_NUM exists from version 7 on, as do the PEXPIRE options GT and NX.
local version = redis.REDIS_VERSION_NUM
-- From Redis 7.2 on, and in any Valkey, client tracking registers only the key that a command
-- reads. Older servers register all KEYS at each read, so a single read as the last command is
-- sufficient. The read follows the write, because a write ends the tracking of its key.
local tracks_read_key = version and version >= 0x70200
local call = redis.call
for i, lock in ipairs(KEYS) do
  -- The lease stays text, because PEXPIRE receives text.
  local claim, lease = ARGV[2 * i - 1], ARGV[2 * i]
  -- A value of another type belongs to another program. Such a value must not fail the renewal of
  -- the remaining locks.
  local is_read, claim_or_failure, record = pcall(read_holder, lock)
  if not is_read and not is_wrong_type(claim_or_failure) then
    return {err = failure_text(claim_or_failure)}
  end
  if is_read and claim_or_failure == claim then
    if version then
      -- GT never shortens the lease. NX restores an expiry that another client removed.
      if call('PEXPIRE', lock, lease, 'GT') == 0 then
        call('PEXPIRE', lock, lease, 'NX')
      end
    elseif call('PTTL', lock) < tonumber(lease) then
      call('PEXPIRE', lock, lease)
    end
    if tracks_read_key then
      call('PTTL', lock)
    end
    answers[i] = tonumber(lease)
  elseif is_read and record and has_several_claims(record) then
    answers[i] = renew_entry(lock, record, claim, lease)
    if tracks_read_key then
      call('PTTL', lock)
    end
  else
    answers[i] = -1
  end
end
if not tracks_read_key then
  call('PTTL', KEYS[1])
end
return answers
