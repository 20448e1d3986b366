-- Returns the text of a failed command. Redis raises a table with the field `err`. Versions before
-- 7 raise a string.
local function failure_text(failure)
  return type(failure) == 'table' and failure.err or tostring(failure)
end

-- Returns whether a read failed because the value has another type. Such a value is not a lock.
-- Every other failure is an error of the server or of the user's rights.
local function is_wrong_type(failure)
  return string.find(failure_text(failure), 'WRONGTYPE', 1, true) ~= nil
end
