-- KEYS: the resource's token key, then the KEYS of the body. ARGV: token, then the ARGV of the
-- body. Returns {1, the body's result}, or {0, the newest token} if the newest token is larger than
-- the token in ARGV.
local newest, token = redis.call('GET', KEYS[1]), ARGV[1]
-- The comparison uses text, because a Lua number cannot represent every token exactly.
if newest and (#newest > #token or #newest == #token and newest > token) then
  return {0, newest}
end
if newest ~= token then
  redis.call('SET', KEYS[1], token)
end
table.remove(KEYS, 1)
table.remove(ARGV, 1)
-- `FencedScript::new` appends the body, and the call of this function.
local function body(KEYS, ARGV)
