-- A lock is a hash of one field, its holder's id, whose value says how often it was entered, as Redisson's RLock has it.

local function holder(lock)
  local fields = redis.call('HGETALL', lock)
  if fields[1] then
    return fields[1], fields[1]
  end
end

local function put(lock, claim, lease)
  redis.call('HSET', lock, claim, '1')
  redis.call('PEXPIRE', lock, lease)
end
