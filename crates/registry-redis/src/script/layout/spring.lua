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

-- The record has no room for a token, so the memory says to whom it was given.
local function memory(last, first, claim)
  return last .. ' ' .. first .. ' ' .. claim
end

local function first_token(record, tokens)
  return string.match(redis.call('GETEX', tokens) or '', '^%d+ (%d+) ' .. string.gsub(record, '%W', '%%%0') .. '$')
end

-- There is no quorum in this layout.
local function restamp()
end
