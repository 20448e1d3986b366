-- A lock is a string, the id of its holder, as Spring Integration's RedisLockRegistry has it.

local function holder(lock)
  local record = redis.call('GETEX', lock)
  if record then
    return record, record
  end
end

local function put(lock, claim, lease)
  redis.call('SET', lock, claim, 'PX', lease)
end
