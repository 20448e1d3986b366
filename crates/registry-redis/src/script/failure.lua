-- What a failed read means. Redis raises a table with the field `err`; versions before 7 raise text.
local function failure_text(failure)
  return type(failure) == 'table' and failure.err or tostring(failure)
end

-- The key holds a value of another type, which is no lock's. Every other error is the server's and says nothing of the key.
local function is_foreign(failure)
  return string.find(failure_text(failure), 'WRONGTYPE', 1, true) ~= nil
end
