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

-- The hash has no room for a token, so the memory says to whom it was given.
local function memory(last, first, claim)
  return last .. ' ' .. first .. ' ' .. claim
end

local function first_token(record, tokens)
  return string.match(redis.call('GETEX', tokens) or '', '^%d+ (%d+) ' .. string.gsub(record, '%W', '%%%0') .. '$')
end

-- There is no quorum in this layout.
local function restamp()
end
