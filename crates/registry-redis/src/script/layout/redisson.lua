-- A lock is a hash with one field, as in Redisson's RLock. The field name is the holder's id, and
-- its value is the number of reentrant acquisitions.

local function read_holder(lock)
  local fields = redis.call('HGETALL', lock)
  if fields[1] then
    return fields[1], fields[1]
  end
end

local function store_holder(lock, claim, lease)
  redis.call('HSET', lock, claim, '1')
  redis.call('PEXPIRE', lock, lease)
end
