-- KEYS: the newest token that has written to the resource, then those of the body. ARGV: token, then those of the body.
-- Answers {1, what the body answers} or {0, the newest token} if that is larger.
local newest, token = redis.call('GET', KEYS[1]), ARGV[1]
-- Numbers of any size: Lua's own would not be exact.
if newest and (#newest > #token or #newest == #token and newest > token) then
  return {0, newest}
end
if newest ~= token then
  redis.call('SET', KEYS[1], token)
end
table.remove(KEYS, 1)
table.remove(ARGV, 1)
local function body(KEYS, ARGV)
