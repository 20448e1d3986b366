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
