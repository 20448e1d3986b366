-- Returns the text of a failed read. Redis raises a table with the field `err`. Versions before 7
-- raise a string.
local function failure_text(failure)
  return type(failure) == 'table' and failure.err or tostring(failure)
end

-- Returns whether the read failed because the value has another type, and so is no lock. Every
-- other failure concerns the server.
local function is_wrong_type(failure)
  return string.find(failure_text(failure), 'WRONGTYPE', 1, true) ~= nil
end
