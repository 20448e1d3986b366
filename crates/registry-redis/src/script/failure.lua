-- Returns the text of a failed read. Redis raises a table with the field `err`; versions before 7
-- raise text.
local function failure_text(failure)
  return type(failure) == 'table' and failure.err or tostring(failure)
end

-- Returns whether the key holds a value of another type, which is not a lock. Every other error
-- concerns the server, not the key.
local function is_foreign(failure)
  return string.find(failure_text(failure), 'WRONGTYPE', 1, true) ~= nil
end
