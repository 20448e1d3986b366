-- KEYS: locks, each followed by its token key. ARGV: the ARGV of `release` for each lock. Returns
-- the response of `release` for each lock, or -1 if it failed.
local answers, size = {}, #ARGV / (#KEYS / 2)
for i = 1, #KEYS / 2 do
  local arguments = {unpack(ARGV, (i - 1) * size + 1, i * size)}
  local is_released, answer = pcall(release, {KEYS[2 * i - 1], KEYS[2 * i]}, arguments)
  answers[i] = is_released and answer or -1
end
return answers
