-- KEYS: locks, each followed by its token key. Returns the server's time in us. For each lock it
-- then returns the record, the remaining lease in ms, and the token if known. The record of a free
-- lock is empty.
local time = redis.call('TIME')
local answers = {string.format('%.0f', time[1] * 1000000 + time[2])}
for i = 1, #KEYS, 2 do
  local is_read, held, record = pcall(holder, KEYS[i])
  if not is_read and not is_foreign(held) then
    return {err = failure_text(held)}
  end
  if not is_read or record == '' then
    -- Another program wrote a value of another type or an empty value. `acquire` also reports such
    -- a key as held.
    record = '?'
  end
  if record and not is_several(record) then
    record = string.sub(record, 1, 2048)
  end
  answers[#answers + 1] = record or ''
  answers[#answers + 1] = redis.call('PTTL', KEYS[i])
  local has_token, token = pcall(first_token, record or '', KEYS[i + 1])
  if not has_token and not is_foreign(token) then
    return {err = failure_text(token)}
  end
  answers[#answers + 1] = record and has_token and token or ''
end
return answers
