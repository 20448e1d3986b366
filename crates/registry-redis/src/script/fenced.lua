-- KEYS: the resource's token key, then the KEYS of the body. ARGV: token, then the ARGV of the
-- body. Returns {1, the body's result}, or {0, the newest token} if that is larger than the given
-- one.
local newest, token = redis.call('GET', KEYS[1]), ARGV[1]
-- Compared as text: a Lua number cannot represent every token exactly.
if newest and (#newest > #token or #newest == #token and newest > token) then
  return {0, newest}
end
if newest ~= token then
  redis.call('SET', KEYS[1], token)
end
table.remove(KEYS, 1)
table.remove(ARGV, 1)
local function body(KEYS, ARGV)
