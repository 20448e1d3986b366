-- A lock is a hash with one field, as in Redisson's RLock. The field name is the holder's id, and
-- its value is the number of reentrant acquisitions.

-- In this layout only, the third value is true for a hash that is not an RLock.
local function read_holder(lock)
  -- Two fields, because a hash of another program may have millions.
  local fields = redis.call('HRANDFIELD', lock, 2)
  if fields[2] then
    -- Not an RLock. Acquisitions find it held, listings omit it, and no script changes it.
    return '?', '?', true
  end
  if fields[1] then
    return fields[1], fields[1]
  end
end

local function store_holder(lock, claim, lease)
  redis.call('HSET', lock, claim, '1')
  -- A failed command does not undo earlier writes of a script. Without an expiry, the lock would
  -- stay held forever.
  if type(redis.pcall('PEXPIRE', lock, lease)) == 'table' then
    redis.call('DEL', lock)
    redis.call('PEXPIRE', lock, lease) -- fails with the same error
  end
end
