-- A lock is a string with the id of its holder, as in Spring Integration's RedisLockRegistry.

local function read_holder(lock)
  local record = redis.call('GETEX', lock)
  if record then
    return record, record
  end
end

local function store_holder(lock, claim, lease)
  redis.call('SET', lock, claim, 'PX', lease)
end
