-- The record contains no token, so the token key also stores the first token and the claim.
local function token_value(last, first, claim)
  return last .. ' ' .. first .. ' ' .. claim
end

local function first_token(record, tokens)
  return string.match(redis.call('GETEX', tokens) or '', '^%d+ (%d+) ' .. string.gsub(record, '%W', '%%%0') .. '$')
end

-- This layout has exclusive locks only.
local function is_several()
  return false
end

-- This layout does not support a quorum.
local function reassign()
end
