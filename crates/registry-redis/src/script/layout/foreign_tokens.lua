-- The record contains no token, so the token key also stores the first token and the claim.
local function format_tokens(last_token, first_token, claim)
  return last_token .. ' ' .. first_token .. ' ' .. claim
end

-- Returns the first token of the claim `record`, if the token key stores the tokens of this claim.
local function read_first_token(record, token_key)
  return string.match(redis.call('GETEX', token_key) or '', '^%d+ (%d+) ' .. string.gsub(record, '%W', '%%%0') .. '$')
end

-- This layout has exclusive locks only.
local function has_several_claims()
  return false
end

-- This layout does not support a quorum.
local function set_round()
end
